"""Threads that help run on other processors than the one that they help, where all processors are needed."""

import contextlib
import os
import threading

import pytest

from raycrew.tensor_transport._bytes import in_sections, kept_threads
from raycrew.tensor_transport._bytes.kept_threads import Crew, apart, run_beside

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


@pytest.fixture
def crew():
    with contextlib.closing(Crew()) as crew:
        yield crew


def made_by(crew, work, count=1):
    crew.run_beside(work, count, futures := [])
    return [future.result(60) for future in futures]


@pytest.mark.hostile
def test_processors_that_are_not_to_be_had_do_no_harm(crew, monkeypatch):
    monkeypatch.setattr(kept_threads, "apart", lambda count: [frozenset({1 << 12})] * count)
    assert made_by(crew, lambda: os.sched_getaffinity(0)) == [os.sched_getaffinity(0)]


def test_a_thread_stays_where_it_is_for_the_next_crew(two_processors, monkeypatch):
    monkeypatch.setattr(kept_threads, "_KEPT_S", 60.0)
    found = {}
    for number in [*two_processors, *two_processors]:
        monkeypatch.setattr(kept_threads, "_this_processor", lambda here=number: here)
        with contextlib.closing(Crew()) as crew:
            ((thread, where),) = made_by(crew, lambda: (threading.current_thread(), os.sched_getaffinity(0)))
        assert where == two_processors - {number}
        assert found.setdefault(number, thread) is thread
    assert len(set(found.values())) == 2


def test_a_crew_does_one_thing_after_another_and_its_threads_are_nobody_elses_meanwhile(crew, monkeypatch):
    monkeypatch.setattr(kept_threads, "_KEPT_S", 60.0)
    may_end, done, futures = threading.Event(), [], []
    crew.run_beside(lambda: may_end.wait(60), 2, futures)
    crew.run_beside(lambda: done.append(threading.current_thread()), 2, futures)
    with contextlib.closing(Crew()) as other:
        (another,) = made_by(other, threading.current_thread)
    assert not done
    may_end.set()
    for future in futures:
        future.result(60)
    assert len({another, *done}) == 3


@pytest.mark.hostile
def test_a_thread_that_is_late_is_there_for_one_only_once_its_crew_is_closed(monkeypatch):
    monkeypatch.setattr(kept_threads, "_KEPT_S", 60.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {(1 << 13) + 1})
    may_end, futures, together = threading.Event(), [], threading.Barrier(2)
    with contextlib.closing(Crew()) as crew:
        crew.run_beside(lambda: may_end.wait(60), 1, futures)
        crew.run_beside(pytest.fail, 1, futures)
        assert futures[1].cancel()
        may_end.set()
        futures[0].result(60)
    for _ in range(3):
        for work in [run_beside(lambda: together.wait(60)) for _ in range(2)]:
            work.result(60)


def test_a_thread_that_had_nothing_to_do_for_long_stays_as_long_as_its_crew(crew, monkeypatch):
    monkeypatch.setattr(kept_threads, "_KEPT_S", 0.01)
    (thread,) = made_by(crew, threading.current_thread)
    thread.join(0.1)
    assert made_by(crew, threading.current_thread) == [thread]
    crew.close()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.hostile
def test_a_crew_without_threads_is_one_of_none(crew, monkeypatch):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(kept_threads._Kept, "start", no_thread)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1 << 13})
    assert made_by(crew, threading.current_thread, 3) == []
