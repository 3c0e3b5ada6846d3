"""Threads that help are there for the next one who needs them, and go when nobody does."""

import contextlib
import itertools
import os
import signal
import threading
import time
import weakref

import pytest
from forking import in_a_child

from raycrew.tensor_transport._bytes import kept_threads
from raycrew.tensor_transport._bytes.kept_threads import run_beside, run_whole

_numbers = itertools.count(500)


@pytest.fixture(autouse=True)
def own_processors(monkeypatch):
    """No thread is there for them yet."""
    mine = {next(_numbers)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: mine)


def helping():
    """Which thread helps this one."""
    found = []
    run_beside(lambda: found.append(threading.current_thread())).result(60)
    return found[0]


@pytest.fixture
def kept_long(monkeypatch):
    monkeypatch.setattr(kept_threads, "_KEPT_S", 60.0)


def test_the_next_work_is_done_by_the_same_thread(kept_long):
    assert helping() is helping()


def test_works_at_once_have_threads_of_their_own():
    together = threading.Barrier(4)
    for work in [run_beside(lambda: together.wait(60)) for _ in range(4)]:
        work.result(60)


def test_threads_end_that_nobody_needs(monkeypatch):
    monkeypatch.setattr(kept_threads, "_KEPT_S", 0.01)
    thread = helping()
    thread.join(60)
    assert not thread.is_alive()
    assert helping() is not thread


def taken():
    """A thread that helps, as whoever has something for it to do takes it."""
    while True:
        helping()
        with contextlib.suppress(IndexError):  # On a busy machine it may have ended by now.
            return kept_threads._idle[kept_threads.processors()].pop()


@pytest.mark.hostile
def test_a_thread_that_is_taken_as_it_ends_does_what_it_is_given(monkeypatch):
    monkeypatch.setattr(kept_threads, "_KEPT_S", 0.01)
    thread = taken()
    thread.join(0.2)  # Longer than it is kept.
    future = kept_threads.Future()
    thread.todo.put((future, lambda: None))
    future.result(60)


def test_the_end_of_the_interpreter_waits_for_none_that_is_idle():
    assert helping().daemon


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_work_raises_is_told_and_its_thread_stays(kept_long, error):
    def fail():
        raise error

    thread = helping()
    with pytest.raises(error):
        run_beside(fail).result(60)
    assert helping() is thread


def test_nothing_of_the_work_is_kept(kept_long):
    class Buffer:
        pass

    buffer = Buffer()
    gone = weakref.ref(buffer)
    run_beside(lambda held=buffer: None).result(60)
    del buffer
    helping()
    deadline = time.monotonic() + 60
    while gone() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_cancelled_work_is_not_done(kept_long):
    thread, busy = helping(), threading.Event()
    first = run_beside(lambda: busy.wait(60))
    thread.todo.put((cancelled := kept_threads.Future(), pytest.fail))
    assert cancelled.cancel()
    busy.set()
    first.result(60)
    assert helping() is thread


def test_a_thread_on_other_processors_is_not_taken(kept_long, monkeypatch):
    thread = helping()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 77})
    assert helping() is not thread


@pytest.mark.hostile
def test_a_forked_child_has_threads_of_its_own(kept_long):
    parents = helping()
    assert in_a_child(lambda: helping() is not parents)
    assert helping() is parents


@pytest.mark.hostile
def test_a_ctrl_c_is_raised_once_what_is_to_be_whole_is_done(kept_long):
    done, before = [], signal.signal(signal.SIGINT, signal.default_int_handler)

    def work():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)  # for it to come meanwhile, which it need not
        done.append("all of it")

    try:
        with pytest.raises(KeyboardInterrupt):
            run_whole(work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["all of it"]


def no_thread(_):
    raise RuntimeError("can't start new thread")


def test_what_is_to_be_whole_is_done_here_where_there_are_no_threads_and_raises_its_own(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        run_whole(lambda: 1 / 0)
    done = []
    monkeypatch.setattr(kept_threads._Kept, "start", no_thread)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {next(_numbers)})
    run_whole(lambda: done.append(threading.current_thread()))
    assert done == [threading.current_thread()]


def test_what_work_makes_is_had():
    assert run_beside(lambda: [1, 2]).result(60) == [1, 2]
