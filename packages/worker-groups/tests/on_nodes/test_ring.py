"""The ring of a worker: calls that have ended, noted while somebody wants to know."""

import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycrew.worker_groups._on_nodes import (
    RING_AT,
    clock_name,
    make_page,
    mark_own_process,
    own_process,
    ring,
    sight,
)
from raycrew.worker_groups._on_nodes.marks import VARIABLE
from raycrew.worker_groups._on_nodes.page import open_ring
from raycrew.worker_groups._on_nodes.ring import ENTRIES, Ring, notes_in
from raycrew.worker_groups._on_nodes.sight import Sights
from raycrew.worker_groups._worker.heart import Heart, Running, as_text


@pytest.fixture(autouse=True)
def no_marks(monkeypatch):
    """What marks this process is not for what later tests start."""
    monkeypatch.setenv(VARIABLE, "")


@pytest.fixture
def memory():
    return memoryview(bytearray(RING_AT + ring.SIZE))


def noted(first, last):
    return [(n.to_bytes(24), "m", float(n), n + 0.5, 0.25) for n in range(first, last + 1)]


def test_a_ring_of_zeros_says_nothing(memory):
    empty = Ring(memory[RING_AT:])
    assert (empty.count, empty.since(0)) == (0, (0, b""))
    assert not empty.is_wanted(0.0)


@given(st.lists(st.integers(0, 2 * ENTRIES), max_size=5))
def test_all_that_was_noted_since_is_told_but_what_was_overwritten(steps):
    written = Ring(memoryview(bytearray(ring.SIZE)))
    seen = 0
    for step in steps:
        for _ in range(step):
            number = written.count + 1
            written.note(number.to_bytes(24), b"m\0\0", float(number), number + 0.5, 0.25)
        count, data = written.since(seen)
        assert count == written.count == seen + step
        first = max(seen, count - ENTRIES + 1) + 1  # the oldest may be overwritten at this moment
        assert list(notes_in(data)) == noted(first, count)
        seen = count


def test_names_are_cut_and_ids_filled(memory):
    written = Ring(memory)
    written.note(b"ab", as_text("é" * 100), 1.0, 2.0, 0.0)
    (note,) = notes_in(written.since(0)[1])
    assert note[:2] == (b"ab".ljust(24, b"\0"), "é" * 32)


def test_what_is_wanted_stays_so_when_the_ring_has_come_round(memory):
    written = Ring(memory)
    written.want(1e18)
    for _ in range(ENTRIES + 1):
        written.note(b"ab", b"m", 1.0, 2.0, 0.0)
    assert (written.wanted, written.count, written.is_wanted(1e17)) == (1e18, ENTRIES + 1, True)


@pytest.mark.hostile
@pytest.mark.parametrize("meanwhile", [0, 1, 7, ENTRIES - 2, ENTRIES - 1, 3 * ENTRIES])
@pytest.mark.parametrize("before", [3, ENTRIES, ENTRIES + 5])
def test_calls_that_are_overwritten_while_they_are_read_are_left_out(memory, before, meanwhile):
    written = Ring(memory)

    def note(first, last):
        for number in range(first, last + 1):
            written.note(number.to_bytes(24), b"m", float(number), number + 0.5, 0.25)

    class Overtaken(Ring):
        def _copied(self, first, last):
            note(before + 1, before + meanwhile)
            half = before + meanwhile + 1  # what is copied has of it what was written by now
            struct.pack_into(ring._ENTRY, self._bytes, ring._place(half), b"half", 0.0, 0.0, 0.0, b"half")
            return super()._copied(first, last)

    note(1, before)
    count, data = Overtaken(memory).since(0)
    assert count == before
    first = max(1, before + meanwhile + 2 - ENTRIES)
    assert list(notes_in(data)) == noted(first, before)


def test_a_heart_notes_calls_only_while_somebody_wants_to_know(memory):
    asked = []
    beating = Heart(memory, lambda: asked.append(1) or b"c" * 24)
    told = Ring(memory[RING_AT:])
    with Running(as_text("before"), beating):
        told.want(1e18)
    with Running(as_text("train"), beating) as call:
        call.wait()
        call.go_on()
    told.want(0.0)
    with Running(as_text("after"), beating):
        pass
    (note,) = notes_in(told.since(0)[1])
    name, method, began, ended, paused_s = note
    assert (name, method) == (b"c" * 24, "train")
    assert began <= ended
    assert 0 < paused_s <= ended - began
    assert asked == [1]


def test_a_call_runs_though_nobody_knows_what_it_is_called(memory):
    def fail():
        raise RuntimeError("no call here")

    told = Ring(memory[RING_AT:])
    told.want(1e18)
    with Running(as_text("train"), Heart(memory, fail)):
        pass
    assert told.count == 0


def test_a_watch_is_told_of_what_ends_after_it_first_asks(monkeypatch):
    mark = mark_own_process()
    beating = Heart(make_page(mark), lambda: os.urandom(24))
    worker, sights = own_process(), Sights()
    assert sights.record(worker._replace(started=1), "0" * 32) is None
    assert "can't be opened" in sights.record(worker, "0" * 32)
    clock, now, before, count, data = sights.record(worker, mark)
    assert (clock, before, count, data) == (clock_name(), 0, 0, b"")
    for name in ("one", "two"):
        with Running(as_text(name), beating):
            pass
    for _ in range(2):  # an answer may get lost
        _, later, before, count, data = sights.record(worker, mark, 0)
        notes = list(notes_in(data))
        assert (before, count, [method for _, method, *_ in notes]) == (0, 2, ["one", "two"])
    assert now <= notes[0][2] <= later
    with monkeypatch.context() as patched:
        patched.setattr(sight, "runs", lambda _: False)
        assert sights.record(worker, mark, 1)[2:4] == (1, 2), "it has not been told of all"
        assert sights.record(worker, mark, 2) is None, "it is gone, and tells no more"
    sights.forget(worker)
    assert sights.record(worker, mark)[2:] == (2, 2, b"")


def test_the_end_of_one_drivers_wish_leaves_anothers():
    mark = mark_own_process()
    beating = Heart(make_page(mark), lambda: os.urandom(24))
    worker, sights, others = own_process(), Sights(), Sights()
    sights.record(worker, mark)
    others.record(worker, mark)
    sights.record(worker, mark, is_last=True)
    with Running(as_text("one"), beating):
        pass
    assert [method for _, method, *_ in notes_in(others.record(worker, mark, 0)[4])] == ["one"]
    told = open_ring(worker.pid, mark)
    told.want(1e18)
    others.record(worker, mark)
    assert told.wanted == 1e18
