import os
import pickle

from hypothesis import given
from hypothesis import strategies as st

from raycrew.worker_groups.fan_out._batches import (
    LEAST_S,
    MAX_BATCH_BYTES,
    TARGET_S,
    Backlog,
    BatchSizer,
    Entry,
)
from raycrew.worker_groups.fan_out._journal import LOADING, Journal, finished


def test_a_batch_takes_about_the_target_time_and_the_last_ones_are_smaller():
    sizer = BatchSizer()
    assert sizer.size(slots=2, remaining=1000) == 1
    for _ in range(10):
        sizer.observe(sizer.size(2, None), sizer.size(2, None) * TARGET_S / 16)
    assert sizer.size(slots=2, remaining=1000) == 16
    assert sizer.size(slots=2, remaining=None) == 16
    assert sizer.size(slots=2, remaining=20) == 5
    assert sizer.size(slots=2, remaining=1) == 1


def test_one_cheap_item_does_not_make_the_next_batch_huge():
    sizer = BatchSizer()
    sizer.observe(1, 1e-9)
    assert sizer.size(1, None) == 4


def test_the_last_batches_are_not_shorter_than_is_worth_sending():
    sizer = BatchSizer(estimate_s=LEAST_S / 100)
    assert [sizer.size(2, remaining) for remaining in (800, 300, 1)] == [200, 100, 100]
    assert BatchSizer(estimate_s=1e-6).size(2, 256) >= 256


def test_slow_items_are_sent_one_by_one():
    sizer = BatchSizer(estimate_s=3.0)
    assert sizer.size(1, 100) == 1


def test_a_fixed_size_is_kept():
    sizer = BatchSizer(fixed=7)
    sizer.observe(7, 100.0)
    assert sizer.size(64, 3) == 7


def backlog_of(items, length=None):
    refused = []
    return Backlog(iter(items), pickle.dumps, lambda i, e: refused.append(i), length), refused


def test_an_item_that_does_not_pickle_is_refused_by_its_index():
    backlog, refused = backlog_of([0, lambda: 0, 2])
    assert [entry.index for entry in backlog.take(10)] == [0, 2]
    assert refused == [1]
    assert backlog.remaining == 0


def test_the_source_is_read_as_late_as_possible():
    read = []

    def source():
        for i in range(100):
            read.append(i)
            yield i

    backlog, _ = backlog_of(source())
    backlog.take(3)
    assert read == [0, 1, 2]
    assert backlog.remaining is None


def test_large_items_make_small_batches_and_none_is_lost():
    backlog, _ = backlog_of([b"x" * (MAX_BATCH_BYTES // 2 + 1)] * 3, length=3)
    assert [len(backlog.take(10)) for _ in range(4)] == [1, 1, 1, 0]


def test_what_was_lost_with_its_host_has_no_neighbours_again():
    backlog, _ = backlog_of(range(2, 4), length=2)
    backlog.take(0)
    backlog.send_again([Entry(0, b"", losses=1), Entry(1, b"", losses=1)])
    assert [[e.index for e in backlog.take(10)] for _ in range(3)] == [[0], [1], [0, 1]]


def test_only_what_was_lost_repeatedly_is_suspect():
    backlog, _ = backlog_of(range(2, 3), length=1)
    assert not backlog.next_is_suspect
    backlog.send_again([Entry(0, b"", losses=1), Entry(1, b"", losses=2)])
    assert not backlog.next_is_suspect
    backlog.take(1)
    assert backlog.next_is_suspect


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(0, 200))
def test_every_item_is_taken_once(sizes, length):
    backlog, _ = backlog_of(range(length), length=length)
    taken = []
    for size in sizes * (length + 1):
        batch = backlog.take(size)
        assert len(batch) <= size
        taken += [entry.index for entry in batch]
        assert backlog.remaining == length - len(taken)
        if len(taken) == length:
            break
    assert taken == list(range(length))


def test_a_journal_cut_short_keeps_every_complete_item():
    journal = Journal(os.memfd_create("test"))
    journal.reset()
    assert journal.current()[0] == LOADING
    for position in range(3):
        journal.start(position)
        journal.finish(position != 1, position / 2, b"x" * position)
    data = journal.read()
    assert list(finished(data)) == [(True, 0.0, b""), (False, 0.5, b"x"), (True, 1.0, b"xx")]
    assert len(list(finished(data[:-1]))) == 2
    journal.reset()
    assert journal.read() == b""
    os.close(journal.fd)


def test_the_head_can_be_read_while_a_batch_begins(monkeypatch):
    journal = Journal(os.memfd_create("test"))
    journal.reset()
    journal.start(3)
    truncate, seen = os.ftruncate, []

    def truncate_and_look(fd, size):
        truncate(fd, size)
        seen.append(journal.current()[0])

    monkeypatch.setattr(os, "ftruncate", truncate_and_look)
    journal.reset()
    assert seen == [3]
    assert journal.current()[0] == LOADING
    os.close(journal.fd)
