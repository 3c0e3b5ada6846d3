"""What modules hold, in a process that is forked while another thread holds a lock of theirs."""

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from raycrew import worker_groups
from raycrew.worker_groups._group.life import leftovers
from raycrew.worker_groups._group.life.leftovers import keep
from raycrew.worker_groups._ray import ModuleLock

SOURCES = Path(worker_groups.__file__).parent


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
    lock = ModuleLock(make)
    held(lock)
    assert in_a_child(lambda: can_be_taken(lock))


def test_it_keeps_others_out(held):
    lock, there = ModuleLock(), threading.Event()
    held(lock)
    threading.Thread(target=lambda: can_be_taken(lock) and there.set(), daemon=True).start()
    assert not there.wait(0.05)


def test_it_is_let_go_of_when_what_is_done_under_it_fails():
    lock = ModuleLock()
    with pytest.raises(ValueError, match="in vain"), lock:
        raise ValueError("in vain")
    assert can_be_taken(lock)


def test_no_module_has_a_lock_that_a_forked_process_could_wait_for():
    plain = re.compile(r"^\w+(: [^=]+)? = threading\.(Lock|RLock|Condition|Semaphore)\(", re.MULTILINE)
    assert not [path for path in SOURCES.rglob("*.py") if plain.search(path.read_text())]


@pytest.mark.hostile
def test_a_forked_process_gives_nothing_back_that_its_parent_keeps(held):
    before = list(leftovers._kept)
    keep(lambda: True)
    try:
        held(leftovers._lock)
        assert in_a_child(lambda: not leftovers._kept and not leftovers.try_again(1.0))
        assert len(leftovers._kept) == len(before) + 1
    finally:
        leftovers._kept[:] = before
