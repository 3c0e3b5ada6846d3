"""A durable queue after its process has ended, in whatever way, and on folders that it must not use."""

import gc
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from raycrew.worker_groups.errors import SampleJournalError, SampleQueueClosedError
from raycrew.worker_groups.rollouts.samples import SampleQueue
from raycrew.worker_groups.rollouts.samples._storage import durable, journal

COLUMNS = ["tokens", "reward"]
PWRITE = os.pwrite


def put(queue, *tokens, version=0):
    return queue.put({"tokens": tokens, "reward": [0.0] * len(tokens)}, version=version)


def left(folder, n=10):
    """The tokens of whatever a queue in a folder still has."""
    with SampleQueue(COLUMNS, directory=folder) as queue:
        held = queue.stats().held
        return queue.get(n, at_least=1, timeout_s=0)["tokens"] if held else []


@pytest.mark.parametrize("options", [{}, {"fsync": True}, {"max_memory": 1}])
def test_a_later_queue_goes_on_where_the_first_one_was(tmp_path, options):
    with SampleQueue(COLUMNS, directory=tmp_path / "queue", **options) as queue:
        ids = queue.put({"tokens": [[1], [2], [3]]}, version=2, lengths=[1, 1, 1])
        queue.add(ids[:2], {"reward": [0.1, 0.2]})
        queue.get(1).done()
        queue.get(1)  # and is never heard of again
        queue.advance(7)
    with SampleQueue(COLUMNS, directory=tmp_path / "queue", **options) as queue:
        stats = queue.stats()
        assert (stats.held, stats.leased, stats.produced, stats.consumed, stats.version) == (2, 0, 3, 1, 7)
        batch = queue.get(1)
        assert dict(batch) == {"tokens": [[2]], "reward": [0.2]} and batch.versions_behind == [5]
        assert batch.token_versions(0) == [2]
        assert put(queue, [4]) == [3], "no number is given twice"
        with queue.get(1, adds=["reward"]) as lacking:
            assert lacking["tokens"] == [[3]]
    assert (tmp_path / "queue").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "queue").iterdir()} == {0o600}


def test_a_journal_that_is_cut_anywhere_has_all_that_was_written_before(tmp_path):
    sizes, states = [], []
    with SampleQueue(COLUMNS, directory=tmp_path / "whole") as queue:
        (file,) = (tmp_path / "whole").glob("*.samples")

        def note(*tokens):
            sizes.append(file.stat().st_size)
            states.append(list(tokens))

        note()
        put(queue, 1, 2)
        note(1, 2)
        queue.get(1).done()
        note(2)
        put(queue, 3)
        note(2, 3)
    data = file.read_bytes()
    for size in {*range(0, len(data), 5), *sizes, *(size - 1 for size in sizes[1:]), len(data)}:
        folder = tmp_path / str(size)
        folder.mkdir(mode=0o700)
        (folder / file.name).write_bytes(data[:size])
        expected = [state for end, state in zip(sizes, states, strict=True) if end <= size]
        assert left(folder) == (expected[-1] if expected else []), size
        assert left(folder) == (expected[-1] if expected else []), "and again, after it was cut"


def test_a_tail_of_zeros_was_never_written(tmp_path):
    with SampleQueue(COLUMNS, directory=tmp_path) as queue:
        put(queue, 1)
    (file,) = tmp_path.glob("*.samples")
    with file.open("ab") as end:
        end.write(bytes(5000))
    assert left(tmp_path) == [1]


def test_what_was_changed_on_disk_is_told_and_not_used(tmp_path):
    with SampleQueue(COLUMNS, directory=tmp_path) as queue:
        put(queue, "first")
        put(queue, "second")
    (file,) = tmp_path.glob("*.samples")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"first", b"fjrst"))
    with pytest.raises(SampleJournalError, match=r"000001.samples is damaged at byte \d+"):
        SampleQueue(COLUMNS, directory=tmp_path)
    file.write_bytes(data)
    assert left(tmp_path) == ["first", "second"]


def test_a_changed_length_hides_nothing_that_is_behind_it(tmp_path):
    with SampleQueue(COLUMNS, directory=tmp_path) as queue:
        (file,) = tmp_path.glob("*.samples")
        at = file.stat().st_size
        for token in range(10):
            put(queue, token)
    data = file.read_bytes()
    for byte in range(8):
        file.write_bytes(data[: at + byte] + bytes([data[at + byte] ^ 1]) + data[at + byte + 1 :])
        with pytest.raises(SampleJournalError, match=f"damaged at byte {at}"):
            SampleQueue(COLUMNS, directory=tmp_path)
        assert file.stat().st_size == len(data)
    file.write_bytes(data)
    assert left(tmp_path) == [*range(10)]


def test_folders_that_are_not_this_queues_are_refused(tmp_path):
    in_use = f"in use by another queue .process {os.getpid()}"
    with SampleQueue(COLUMNS, directory=tmp_path / "a"), pytest.raises(SampleJournalError, match=in_use):
        SampleQueue(COLUMNS, directory=tmp_path / "a")
    with pytest.raises(
        SampleJournalError, match="is of a queue with the columns tokens, reward, not of one with x"
    ):
        SampleQueue(["x"], directory=tmp_path / "a")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(SampleJournalError, match="others can write there"):
        SampleQueue(COLUMNS, directory=tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(SampleJournalError, match="no folder"):
        SampleQueue(COLUMNS, directory=tmp_path / "link")
    for options in ({"fsync": True}, {"directory": tmp_path, "spill": True, "max_memory": 1}):
        with pytest.raises(ValueError, match="directory"):
            SampleQueue(COLUMNS, **options)


def test_a_folder_in_which_a_file_is_missing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1000)
    with SampleQueue(COLUMNS, directory=tmp_path) as queue:
        put(queue, "first")
        for _ in range(5):
            put(queue, "x" * 1000)
    files = sorted(tmp_path.glob("*.samples"))
    files[2].rename(tmp_path / "away")
    with pytest.raises(SampleJournalError, match=f"{files[2].name} is missing"):
        SampleQueue(COLUMNS, directory=tmp_path)
    (tmp_path / "away").rename(files[2])
    assert len(left(tmp_path)) == 6


def test_files_that_were_not_begun_in_earnest_go(tmp_path):
    with SampleQueue(COLUMNS, directory=tmp_path) as queue:
        put(queue, 1)
    for content in (b"", b"begun", b""):
        last = max(int(path.stem) for path in tmp_path.glob("*.samples"))
        (tmp_path / f"{last + 1:010d}.samples").write_bytes(content)
        n_files = len(list(tmp_path.glob("*.samples")))
        assert left(tmp_path) == [1]
        assert len(list(tmp_path.glob("*.samples"))) == n_files, "one went, and one came"


def test_a_file_of_somebody_else_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1000)
    with SampleQueue(COLUMNS, directory=tmp_path) as queue:
        put(queue, "x" * 1000)
        (file,) = tmp_path.glob("*.samples")
        other = tmp_path / f"{int(file.stem) + 1:010d}.samples"
        other.write_bytes(b"of a queue that came past the lock")
        with pytest.raises(SampleJournalError, match="File exists"):
            put(queue, "x" * 1000)
    assert other.read_bytes() == b"of a queue that came past the lock"


def test_a_queue_that_nobody_has_closed_does_not_keep_its_folder(tmp_path):
    queue = SampleQueue(COLUMNS, directory=tmp_path)
    put(queue, 1)
    del queue
    gc.collect()
    assert left(tmp_path) == [1]


def test_a_folder_that_can_not_be_locked_is_not_taken_for_one_in_use(tmp_path, monkeypatch):
    def no_locks(descriptor, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(OSError, match="No locks available"):
        SampleQueue(COLUMNS, directory=tmp_path)


def test_what_another_version_has_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_FORMAT", 2)
    with SampleQueue(COLUMNS, directory=tmp_path) as queue:
        put(queue, 1)
    monkeypatch.undo()
    with pytest.raises(SampleJournalError, match="another version of raycrew"):
        SampleQueue(COLUMNS, directory=tmp_path)


def test_handles_are_refused_where_they_may_outlive_what_they_stand_for(tmp_path):
    handles = type("Handles", (list,), {"select": None, "join_rows": None})
    with (
        SampleQueue(COLUMNS, directory=tmp_path) as queue,
        pytest.raises(TypeError, match="put the values themselves"),
    ):
        queue.put({"tokens": handles([1])}, version=0)


def test_files_go_though_a_few_samples_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 20_000)
    monkeypatch.setattr(durable, "_SLACK_BYTES", 40_000)
    with SampleQueue(COLUMNS, directory=tmp_path, max_memory=1000) as queue:
        (kept,) = queue.put({"tokens": ["stays"]}, version=0)
        for i in range(100):
            put(queue, *[bytes([i]) * 1000] * 5)
            with queue.get(5) as batch:
                assert batch["tokens"] == [bytes([i]) * 1000] * 5
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 100_000
        queue.add([kept], {"reward": [1.0]})
        stats = queue.stats()
    assert (stats.produced, stats.consumed, stats.held) == (501, 500, 1)
    assert left(tmp_path) == ["stays"]


@pytest.mark.parametrize("seed", range(2))
def test_what_is_counted_agrees_with_what_is_held_wherever_the_process_is_killed(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 600)
    monkeypatch.setattr(durable, "_SLACK_BYTES", 600)
    folder, killed, random, write = tmp_path / "queue", [], Random(seed), journal.write_all

    def kill():
        killed.append(tmp_path / f"killed{len(killed)}")
        shutil.copytree(folder, killed[-1])

    def write_and_kill(descriptor, data, offset):
        kill()
        write(descriptor, data[: len(data) // 2], offset)
        kill()
        write(descriptor, data, offset)
        kill()

    monkeypatch.setattr(journal, "write_all", write_and_kill)
    with SampleQueue(COLUMNS, directory=folder, stale="drop") as queue:
        for version in range(12):
            put(queue, *["x" * random.randrange(50) for _ in range(random.randrange(1, 5))], version=version)
            if (held := queue.stats().held) > 3:
                batch = queue.get(
                    random.randrange(1, held), at_least=1, max_staleness=random.choice([None, 4])
                )
                (batch.done, batch.give_back)[random.random() < 0.3]()
    monkeypatch.setattr(journal, "write_all", write)
    for one in killed:
        with SampleQueue(COLUMNS, directory=one) as queue:
            stats = queue.stats()
        assert stats.produced == stats.held + stats.consumed + stats.dropped, one.name


def break_writes_off(monkeypatch, error):
    """Have each write end after some bytes."""
    write = os.pwrite

    def broken_off(descriptor, data, offset):
        write(descriptor, bytes(data[:7]), offset)
        raise error

    monkeypatch.setattr(os, "pwrite", broken_off)


def test_an_interrupt_in_the_middle_of_a_write_leaves_nothing_of_it(tmp_path, monkeypatch):
    with SampleQueue(COLUMNS, directory=tmp_path, max_memory=1) as queue:
        put(queue, "first")
        break_writes_off(monkeypatch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            put(queue, "second")
        monkeypatch.undo()
        put(queue, "third")
        assert queue.get(2)["tokens"] == ["first", "third"]
    assert left(tmp_path) == ["first", "third"]


def test_nor_does_one_at_the_end_of_a_file_behind_which_another_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 2000)
    long = ["a" * 1100, "b" * 1000]
    with SampleQueue(COLUMNS, directory=tmp_path) as queue:
        put(queue, long[0])
        break_writes_off(monkeypatch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            put(queue, "short")
        monkeypatch.setattr(os, "pwrite", PWRITE)
        put(queue, long[1])
        assert len(list(tmp_path.glob("*.samples"))) == 2
    assert left(tmp_path) == long


def test_a_disk_that_fails_closes_the_queue_and_loses_nothing_before(tmp_path, monkeypatch):
    with SampleQueue(COLUMNS, directory=tmp_path) as queue, ThreadPoolExecutor(1) as threads:
        put(queue, 1)
        break_writes_off(monkeypatch, OSError(28, "No space left on device"))
        waiting = threads.submit(queue.get, 5)
        while not queue._channel._keeper._listeners:
            time.sleep(0.01)
        with pytest.raises(SampleJournalError, match="No space left"):
            put(queue, 2, version=3)
        monkeypatch.undo()
        for use in (lambda: waiting.result(60), lambda: queue.get(1)):
            with pytest.raises(SampleJournalError, match="No space left"):
                use()
    assert left(tmp_path) == [1]


def descriptors_of(folder):
    """Those that this process has of the samples of a queue."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # That of the folder that is listed here.
            if link.readlink().parent == folder and link.readlink().suffix == ".samples":
                found.append(int(link.name))
    return found


def taken_by_others(folder, other):
    """Close what a queue has open, and have another file have the numbers."""
    numbers = descriptors_of(folder)
    for fd in numbers:
        os.close(fd)
    opened = [os.open(other, os.O_RDWR) for _ in numbers]
    assert sorted(opened) == sorted(numbers)
    return opened


@pytest.mark.hostile
def test_rows_are_read_from_their_own_file_where_another_one_has_its_number(tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"o" * 10_000)
    with SampleQueue(COLUMNS, directory=tmp_path / "queue", max_memory=1) as queue:
        put(queue, "first", "second")
        assert queue.get(1)["tokens"] == ["first"]  # opens the file to read it
        numbers = taken_by_others(tmp_path / "queue", other)
        assert queue.get(1)["tokens"] == ["second"]
    assert all(os.path.samestat(os.fstat(fd), other.stat()) for fd in numbers), "they are not the queue's"
    for fd in numbers:
        os.close(fd)


@pytest.mark.hostile
def test_nothing_is_written_to_another_file_that_has_the_number_of_its_own(tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"o" * 10_000)
    with SampleQueue(COLUMNS, name="rollouts", directory=tmp_path / "queue") as queue:
        put(queue, 1)
        numbers = taken_by_others(tmp_path / "queue", other)
        with pytest.raises(
            SampleJournalError, match=r"rollouts can't write to .* something else has closed it"
        ):
            put(queue, 2)
    assert other.read_bytes() == b"o" * 10_000
    assert all(os.path.samestat(os.fstat(fd), other.stat()) for fd in numbers), "they are not the queue's"
    for fd in numbers:
        os.close(fd)
    assert left(tmp_path / "queue") == [1]


def test_rows_that_can_not_be_read_are_refused_by_the_name_of_the_queue(tmp_path):
    with SampleQueue(COLUMNS, name="rollouts", directory=tmp_path, max_memory=1) as queue:
        put(queue, "a row")
        (file,) = tmp_path.glob("*.samples")
        os.truncate(file, 20)
        with pytest.raises(SampleJournalError, match=r"rollouts can't .* is cut short"):
            queue.get(1)


KILLED = """
    import sys
    from raycrew.worker_groups.rollouts.samples import SampleQueue

    queue = SampleQueue(["tokens", "reward"], directory=sys.argv[1], shuffle_seed=0)
    for start in range(int(sys.argv[2]), 10**9, 3):
        queue.put({"tokens": range(start, start + 3), "reward": [0] * 3}, version=0)
        print(f"put {start}", flush=True)
        if start % 2:
            batch = queue.get(2)
            print("got " + " ".join(map(str, batch["tokens"])), flush=True)
            batch.done()
            print("done " + " ".join(map(str, batch["tokens"])), flush=True)
"""


@pytest.mark.hostile
@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.long)])
def test_whoever_kills_the_process_loses_and_doubles_nothing(tmp_path, kills):
    """What was put is held or done, and what was done never comes again."""
    put_for_sure, maybe, done_for_sure, maybe_done = set(), set(), set(), set()
    for kill in range(kills):
        start = 10_000_000 * kill
        code = textwrap.dedent(KILLED)
        process = subprocess.Popen(
            [sys.executable, "-c", code, tmp_path / "queue", str(start)], stdout=subprocess.PIPE, text=True
        )
        lines = []
        for line in process.stdout:
            if line.endswith("\n"):
                lines.append(line.split())
            if len(lines) == 40 + 7 * kill:
                process.send_signal(signal.SIGKILL)
        process.wait()
        for what, *numbers in lines:
            tokens = [int(number) for number in numbers]
            if what == "put":
                put_for_sure |= set(range(tokens[0], tokens[0] + 3))
                maybe |= set(range(tokens[0] + 3, tokens[0] + 9))
            else:
                (maybe_done if what == "got" else done_for_sure).update(tokens)
    there = left(tmp_path / "queue", 10_000)
    assert len(there) == len(set(there)) and not done_for_sure & set(there)
    assert put_for_sure - done_for_sure - maybe_done <= set(there) <= put_for_sure | maybe


def test_a_forked_child_does_not_keep_the_folder_and_has_no_queue(tmp_path):
    queue = SampleQueue(COLUMNS, directory=tmp_path)
    told, tells = os.pipe()
    wait, go_on = os.pipe()
    child = os.fork()
    if not child:
        try:
            queue.stats()
        except SampleQueueClosedError as error:
            os.write(tells, pickle.dumps(str(error)))
        os.close(go_on)
        os.read(wait, 1)
        os._exit(0)
    try:
        assert "forked" in pickle.loads(os.read(told, 1000))
        queue.close()
        assert left(tmp_path) == []
    finally:
        os.close(go_on)
        os.waitpid(child, 0)
        for descriptor in (told, tells, wait):
            os.close(descriptor)
