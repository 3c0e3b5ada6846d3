"""Threads that help run on other processors than the one that they help, where all processors are needed."""

import os
import threading

import pytest

from raycrew.tensor_transport._bytes import in_sections, kept_threads
from raycrew.tensor_transport._bytes.kept_threads import apart, run_beside

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="threads can't be told where to run on this system"
)


@pytest.fixture
def four_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4))


@pytest.fixture
def two_processors():
    """This thread may run on two only."""
    mine = os.sched_getaffinity(0)
    if len(mine) < 2:
        pytest.skip("there is one processor only")
    two = set(sorted(mine)[:2])
    os.sched_setaffinity(0, two)
    yield two
    os.sched_setaffinity(0, mine)


@pytest.mark.parametrize(("here", "count"), [(2, 0), (2, 1), (2, 2), (2, 4), (-1, 3), (7, 3)])
def test_where_more_processors_are_there_or_it_is_not_known_they_run_on_any(
    four_processors, monkeypatch, here, count
):
    monkeypatch.setattr(kept_threads, "_this_processor", lambda: here)
    assert apart(count) == [frozenset(range(4))] * count


def test_where_all_processors_are_needed_each_has_one_of_its_own(four_processors, monkeypatch):
    monkeypatch.setattr(kept_threads, "_this_processor", lambda: 2)
    assert apart(3) == [frozenset({number}) for number in (0, 1, 3)]


def test_a_system_that_does_not_tell_has_them_run_on_any(four_processors, monkeypatch):
    monkeypatch.setattr(kept_threads, "_sched_getcpu", None)
    assert apart(3) == [frozenset(range(4))] * 3


def test_who_helps_stays_on_one_processor_and_who_is_helped_does_not(two_processors):
    there, found = threading.Barrier(2), {}

    def work(start, stop):
        if start < 2 << 20:
            there.wait(60)  # Each of both gets one of the first sections.
        found[threading.current_thread()] = os.sched_getaffinity(0)

    in_sections(16 << 20, 1 << 20, work)
    assert found.pop(threading.current_thread()) == two_processors
    (helpers,) = found.values()
    assert len(helpers) == 1 and helpers < two_processors


@pytest.mark.hostile
def test_processors_that_are_not_to_be_had_do_no_harm():
    found = run_beside(lambda: os.sched_getaffinity(0), frozenset({1 << 12})).result(60)
    assert found == os.sched_getaffinity(0)


def test_a_thread_stays_where_it_is_for_who_asks_for_the_same_processors(two_processors, monkeypatch):
    monkeypatch.setattr(kept_threads, "_KEPT_S", 60.0)
    one, other = (frozenset({number}) for number in sorted(two_processors))
    first = run_beside(threading.current_thread, one).result(60)
    assert run_beside(threading.current_thread, one).result(60) is first
    assert run_beside(threading.current_thread, other).result(60) is not first
    assert run_beside(lambda: os.sched_getaffinity(0), one).result(60) == one
