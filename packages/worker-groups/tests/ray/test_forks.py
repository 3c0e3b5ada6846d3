"""What modules hold, in a process that is forked while another thread holds a lock of theirs."""

import os
import signal
import threading

import pytest

from raycrew.worker_groups._group.life import leftovers
from raycrew.worker_groups._group.life.leftovers import keep
from raycrew.worker_groups._ray import PerProcess


def in_a_child(act):
    """What `act` gives in a forked child, that is ended if it waits for ever: a truth value."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(20)
            os._exit(0 if act() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def can_be_taken(lock):
    with lock:
        return True


@pytest.fixture
def held():
    """Has another thread hold a lock until the test has ended."""
    begun, ended = threading.Event(), threading.Event()

    def hold(lock):
        def run():
            with lock:
                begun.set()
                ended.wait(60)

        threading.Thread(target=run, daemon=True).start()
        assert begun.wait(60)

    yield hold
    ended.set()


@pytest.mark.hostile
@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_a_lock_of_a_module_is_nobodys_in_a_forked_process(held, make):
    lock = PerProcess(make)
    held(lock.here)
    assert in_a_child(lambda: can_be_taken(lock.here))


@pytest.mark.hostile
@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_what_was_taken_before_a_fork_is_let_go_of_in_both_processes(make):
    lock = PerProcess(make)

    def let_go():
        return taken.__exit__(None, None, None) is None and can_be_taken(lock.here)

    taken = lock.here
    with taken:
        assert in_a_child(let_go)
    assert can_be_taken(lock.here)


def test_it_is_one_in_a_process():
    lock, there = PerProcess(threading.Lock), threading.Event()
    with lock.here:
        threading.Thread(target=lambda: can_be_taken(lock.here) and there.set(), daemon=True).start()
        assert not there.wait(0.05)
    assert there.wait(60)


@pytest.mark.hostile
def test_a_forked_process_gives_nothing_back_that_its_parent_keeps(held):
    before = list(leftovers._kept)
    keep(lambda: True)
    try:
        held(leftovers._lock.here)
        assert in_a_child(lambda: not leftovers._kept and not leftovers.try_again(1.0))
        assert len(leftovers._kept) == len(before) + 1
    finally:
        leftovers._kept[:] = before
