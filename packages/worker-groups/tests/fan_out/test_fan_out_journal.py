import os
import struct
import time

import pytest

from raycrew.worker_groups._fan_out.processes.journal import (
    INITIALIZING,
    LOADING,
    Finished,
    Journal,
    Stamp,
    StrayMessageError,
    count_finished,
    finished,
)


@pytest.fixture
def journal():
    journal = Journal(os.memfd_create("test"))
    yield journal
    os.close(journal.fd)


@pytest.fixture
def stamp():
    return Stamp(slot=3, batch=5, pid=os.getpid())


def written(journal, stamp, results):
    journal.begin(stamp)
    for position, payload in enumerate(results):
        journal.start(position)
        journal.finish(position, position % 2 == 0, position / 2, payload)
    return journal.read()


def test_every_finished_item_is_read_back_as_it_was_written(journal, stamp):
    data = written(journal, stamp, [b"", b"x", b"yy"])
    assert list(finished(data, stamp)) == [
        Finished(True, 0.0, b""),
        Finished(False, 0.5, b"x"),
        Finished(True, 1.0, b"yy"),
    ]
    assert count_finished(data, stamp) == 3


def test_a_journal_cut_at_any_byte_keeps_every_complete_item_and_no_other(journal, stamp):
    payloads = [b"a" * 3, b"", b"c" * 7]
    data = written(journal, stamp, payloads)
    frame = (len(data) - 10) // 3
    ends = [frame + 3, 2 * frame + 3, 3 * frame + 10]
    for cut in range(len(data) + 1):
        whole = sum(end <= cut for end in ends)
        assert [end.payload for end in finished(data[:cut], stamp)] == payloads[:whole]
        assert count_finished(data[:cut], stamp) == whole


def test_a_batch_begins_with_nothing_of_the_one_before(journal, stamp):
    assert (journal.head(), journal.read()) == (None, b"")
    written(journal, stamp, [b"long" * 100])
    later = stamp._replace(batch=6)
    journal.begin(later)
    assert journal.read() == b""
    assert journal.head()[:2] == (later, INITIALIZING)
    journal.finish(LOADING, False, 0.0, b"why")
    assert [end.payload for end in finished(journal.read(), later, LOADING)] == [b"why"]


def test_the_head_says_whose_it_is_what_runs_and_since_when(journal, stamp):
    journal.begin(stamp)
    before = time.monotonic()
    journal.start(7)
    head = journal.head()
    assert head[:2] == (stamp, 7)
    assert before <= head.started <= time.monotonic()


def test_a_head_that_is_being_written_is_read_again(journal, stamp, monkeypatch):
    journal.begin(stamp)
    pread, reads = os.pread, []

    def read_while_written(fd, size, offset):
        data = pread(fd, size, offset)
        reads.append(data)
        if len(reads) == 1:
            journal.start(0)
        if len(reads) == 2:
            journal.start(1)
        return data

    monkeypatch.setattr(os, "pread", read_while_written)
    assert journal.head().position == 1
    assert len(reads) == 4


def test_the_head_can_be_read_while_a_batch_begins(journal, stamp, monkeypatch):
    journal.begin(stamp)
    journal.start(3)
    truncate, seen = os.ftruncate, []

    def truncate_and_look(fd, size):
        truncate(fd, size)
        seen.append(journal.head().position)

    monkeypatch.setattr(os, "ftruncate", truncate_and_look)
    journal.begin(stamp)
    assert seen == [3]


@pytest.mark.parametrize("other", [{"slot": 4}, {"batch": 6}, {"pid": 1}])
def test_an_entry_of_another_is_refused(journal, stamp, other):
    data = written(journal, stamp, [b"a", b"b"])
    with pytest.raises(StrayMessageError):
        list(finished(data, stamp._replace(**other)))
    with pytest.raises(StrayMessageError):
        count_finished(data, stamp._replace(**other))


@pytest.mark.parametrize("positions", [[1], [0, 0], [0, 2], [-1]])
def test_an_entry_out_of_its_place_is_refused(journal, stamp, positions):
    journal.begin(stamp)
    for position in positions:
        journal.finish(position, True, 0.0, b"x")
    with pytest.raises(StrayMessageError, match="journal"):
        list(finished(journal.read(), stamp))


def test_an_entry_of_impossible_size_is_refused(journal, stamp):
    data = bytearray(written(journal, stamp, [b""]))
    data[-8:] = struct.pack("=q", -1)
    with pytest.raises(StrayMessageError):
        list(finished(bytes(data), stamp))


@pytest.mark.hostile
@pytest.mark.parametrize(
    "write",
    [
        lambda journal, stamp: journal.begin(stamp),
        lambda journal, _: journal.start(1),
        lambda journal, _: journal.finish(0, True, 0.0, b"the child's"),
        lambda journal, _: journal.end_strays(),
    ],
)
def test_a_forked_child_ends_before_it_writes(journal, stamp, write):
    journal.begin(stamp)
    before = journal.head()
    child = os.fork()
    if child == 0:
        write(journal, stamp)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert journal.head() == before
    assert journal.read() == b""


def test_a_large_entry_is_written_whole_however_little_the_kernel_takes(journal, stamp, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, bytes(data[:50]), offset))
    data = written(journal, stamp, [b"a" * 333, b"b" * 7])
    assert [end.payload for end in finished(data, stamp)] == [b"a" * 333, b"b" * 7]


def test_a_large_journal_is_read_whole_however_little_the_kernel_gives(journal, stamp, monkeypatch):
    data = written(journal, stamp, [b"a" * 333])
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 50), offset))
    assert journal.read() == data


def test_a_journal_that_is_cut_while_it_is_read_gives_what_was_there(journal, stamp, monkeypatch):
    data = written(journal, stamp, [b"a" * 33])
    size = os.fstat(journal.fd).st_size
    os.ftruncate(journal.fd, size - 10)
    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((*fstat(fd)[:6], size, *fstat(fd)[7:])))
    assert journal.read() == data[:-10]


def test_it_is_told_apart_whether_a_process_initializes_loads_or_runs_an_item(journal, stamp):
    journal.begin(stamp)
    positions = [journal.head().position]
    for position in (LOADING, 0, 1):
        journal.start(position)
        positions.append(journal.head().position)
    assert positions == [INITIALIZING, LOADING, 0, 1]
    assert len(set(positions)) == 4 and INITIALIZING < LOADING < 0
