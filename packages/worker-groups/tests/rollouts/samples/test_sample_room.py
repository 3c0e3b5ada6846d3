"""Who may put first where room is short, and what becomes of room on disk."""

import asyncio
import gc
import os
import tempfile
import threading

import pytest

from raycrew.worker_groups.errors import SampleJournalError, SampleQueueTimeoutError
from raycrew.worker_groups.rollouts.samples import SampleQueue
from raycrew.worker_groups.rollouts.samples._keeping.room import PLACE_S, Room
from raycrew.worker_groups.rollouts.samples._storage import Rows, spilling
from raycrew.worker_groups.rollouts.samples._storage.spilling import SpilledRows


class Held:
    """A ledger of so many samples, and options of a queue."""

    max_samples = 16

    def __init__(self, n):
        self.samples = range(n)


@pytest.fixture
def held():
    return Held(10)


@pytest.fixture
def room(held):
    return Room(Held, held, Rows(1000))


def test_who_brings_less_does_not_pass_by_who_brings_more(room, held):
    assert room.takes(6, 0, "a", 0.0) and room.n_before("z") == 0
    assert not room.takes(7, 0, "much", 0.0)
    assert not room.takes(1, 0, "little", 0.1)
    assert [room.n_before(one) for one in ("much", "little", "z")] == [0, 1, 2]
    held.samples = range(9)
    assert not room.takes(1, 0, "little", 0.2)
    assert room.takes(7, 0, "much", 0.3)
    assert room.takes(1, 0, "little", 0.4) and room.takes(1, 0, "", 0.4)


def test_who_does_not_try_again_loses_the_place(room):
    assert not room.takes(7, 0, "killed", 0.0)
    assert not room.takes(1, 0, "a", PLACE_S / 2)
    assert not room.takes(7, 0, "killed", PLACE_S / 2)
    assert not room.takes(1, 0, "a", PLACE_S)
    assert room.takes(1, 0, "a", 1.5 * PLACE_S)
    assert room.n_before("z") == 0


def test_who_leaves_keeps_nobody_waiting(room):
    assert not room.takes(7, 0, "much", 0.0)
    assert not room.takes(1, 0, "a", 0.0)
    assert room.leave("much") and not room.leave("much") and not room.leave(None)
    assert room.takes(1, 0, "a", 0.0)


def test_where_samples_are_short_whoever_has_room_may_pass(room):
    assert not room.takes(7, 0, "much", 0.0)
    room.is_short = True
    assert not room.takes(7, 0, "much", 0.0)
    assert room.takes(6, 0, "little", 0.0)
    room.is_short = False
    assert not room.takes(1, 0, "little", 0.0)


def test_memory_is_room_too(room):
    room._rows.in_memory_bytes = 900
    assert not room.takes(1, 101, "much", 0.0)
    assert not room.takes(1, 1, "little", 0.0)
    room._rows.in_memory_bytes = 800
    assert room.takes(1, 101, "much", 0.0)
    assert room.takes(1, 1, "little", 0.0)
    assert room.takes(1, 200, "all that is left", 0.0) and not room.takes(1, 201, "more", 0.0)


def test_a_consumer_who_waits_for_more_is_brought_it_past_a_large_put():
    with SampleQueue(["x"], max_samples=16) as queue:
        queue.put({"x": [0] * 5}, version=0)
        many = threading.Thread(target=lambda: queue.put({"x": [2] * 12}, version=0, timeout_s=30))
        many.start()
        got = []

        def get():
            with queue.get(8, timeout_s=30) as batch:
                got.extend(batch["x"])

        consumer = threading.Thread(target=get)
        consumer.start()
        for _ in range(3):
            queue.put({"x": [1]}, version=0, timeout_s=30)
        consumer.join()
        many.join()
        assert (got, queue.stats().held) == ([0] * 5 + [1] * 3, 12)


def test_a_put_says_who_waits_before_it():
    with SampleQueue(["x"], max_samples=4) as queue:
        queue.put({"x": [0] * 3}, version=0)
        assert not queue._channel._keeper._room.takes(2, 0, "another", 1e300)
        with pytest.raises(SampleQueueTimeoutError, match="1 others wait for room before"):
            queue.put({"x": [1]}, version=0, timeout_s=0)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(spilling, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(spilling, "SEGMENT_BYTES", 64 * 1024)


def on_disk(spilled):
    return sum(os.fstat(file.descriptor).st_blocks for file in spilled._files.values()) * 512


def test_room_on_disk_goes_back_in_which_nothing_is_wanted(tmp_path, small_blocks):
    spilled = SpilledRows(tmp_path)
    if not spilled._has_holes:
        pytest.skip("this file system takes no part of a file back")
    rows = [bytes([i % 251]) * 1000 for i in range(1000)]
    places = [spilled.write(row) for row in rows]
    assert on_disk(spilled) >= 1_000_000
    for i, place in enumerate(places):
        if i % 100:
            spilled.free(place)
    assert on_disk(spilled) < 200_000
    assert [spilled.read(place) for place in places[::100]] == rows[::100]
    more = [spilled.write(row) for row in rows]
    for place in places[::100]:
        spilled.free(place)
    assert [spilled.read(place) for place in more] == rows
    spilled.close()


def test_a_file_goes_with_its_last_row(tmp_path, monkeypatch, small_blocks):
    monkeypatch.setattr(spilling, "punch", lambda *_: False)
    spilled = SpilledRows(tmp_path)
    places = [spilled.write(bytes(1000)) for _ in range(1000)]
    assert len(spilled._files) == len({place.segment for place in places}) == 16
    for place in places[1:]:
        spilled.free(place)
    assert set(spilled._files) == {0, spilled._current}
    spilled.free(places[0])
    assert set(spilled._files) == {spilled._current}
    spilled.close()


def test_what_is_wanted_is_found_out_anew(tmp_path, small_blocks):
    spilled = SpilledRows(tmp_path)
    places = [spilled.write(bytes([i]) * 3000) for i in range(4)]
    spilled._wanted[0].clear()  # as after an operation that was broken off anywhere
    spilled.count(places[1:])
    spilled.free(places[1])
    assert [spilled.read(place)[:1] for place in places[2:]] == [bytes([2]), bytes([3])]
    spilled.close()


@pytest.fixture
def stranger(tmp_path):
    """Has another file without a name take the place of what rows were spilled to."""
    numbers = []

    def take_the_place(spilled):
        (mine,) = spilled._files.values()
        numbers.append(mine.descriptor)
        os.close(numbers[0])
        with tempfile.TemporaryFile(dir=tmp_path, buffering=0) as other:  # often of the same inode, too
            other.write(b"o" * 10_000)
            os.dup2(other.fileno(), numbers[0])

    yield take_the_place
    gc.collect()
    assert os.pread(numbers[0], 20_000, 0) == b"o" * 10_000, "it is not the queue's"
    os.close(numbers[0])


@pytest.mark.hostile
def test_spilled_rows_are_not_taken_from_another_file_that_has_the_number_of_theirs(tmp_path, stranger):
    with SampleQueue(["x"], name="rollouts", max_memory=1, spill=tmp_path) as queue:
        queue.put({"x": ["first", "second"]}, version=0)
        stranger(queue._channel._keeper._rows._spilled)
        with pytest.raises(SampleJournalError, match=r"rollouts can't read .* something else has closed it"):
            queue.get(1)
        queue.put({"x": ["third"]}, version=9)
        queue.advance(9)
        assert queue.discard(max_staleness=1) == 2, "what is lost can go"
        assert queue.get(1)["x"] == ["third"]


@pytest.mark.hostile
def test_a_queue_that_nobody_has_closed_closes_no_file_of_others(tmp_path, stranger):
    queue = SampleQueue(["x"], max_memory=1, spill=tmp_path)
    stranger(queue._channel._keeper._rows._spilled)
    del queue


def test_much_that_is_spilled_takes_one_descriptor(tmp_path):
    with SampleQueue(["x"], max_memory=1, spill=tmp_path) as queue:
        spilled = queue._channel._keeper._rows._spilled
        if not spilled._has_holes:
            pytest.skip("this file system takes no part of a file back")
        for _ in range(17):
            queue.put({"x": [bytes(2 << 20), bytes(2 << 20)]}, version=0)
        assert len(spilled._files) == 1


def test_a_put_that_is_cancelled_or_late_keeps_nobody_out():
    async def give_up(queue):
        waiting = asyncio.create_task(queue.put_async({"x": [2] * 12}, version=0))
        while not queue._channel._keeper._room.n_before("z"):
            await asyncio.sleep(0)
        with pytest.raises(SampleQueueTimeoutError, match="1 others"):
            await queue.put_async({"x": [1]}, version=0, timeout_s=0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with SampleQueue(["x"], max_samples=16) as queue:
        queue.put({"x": [0] * 10}, version=0)
        asyncio.run(give_up(queue))
        queue.put({"x": [1]}, version=0, timeout_s=0)
        with pytest.raises(SampleQueueTimeoutError):
            queue.put({"x": [2] * 12}, version=0, timeout_s=0.01)
        queue.put({"x": [1]}, version=0, timeout_s=0)
