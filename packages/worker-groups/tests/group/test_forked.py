"""What belongs to a group, in a process that was forked while another thread used it; no Ray is needed."""

import os
import sys
import threading
from contextlib import contextmanager, nullcontext

import pytest
from patience import eventually
from workers import Worker

from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import PhaseManager, WorkerGroupClosedError
from raycrew.worker_groups.errors import PhaseError
from raycrew.worker_groups.testing import InProcessGroup

pytestmark = pytest.mark.hostile


@contextmanager
def held(lock):
    """Another thread has it."""
    has_it, may_end = threading.Event(), threading.Event()

    def hold():
        with lock:
            has_it.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert has_it.wait(60)
        yield
    finally:
        may_end.set()
        thread.join()


def assert_in_child(check):
    """In a process that is forked now this is so, and comes to an end."""
    with pytest.warns(DeprecationWarning) if sys.version_info >= (3, 12) else nullcontext():
        pid = os.fork()
    if pid == 0:
        try:
            check()
        except BaseException:  # noqa: BLE001 - told by its exit code
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    statuses = []

    def has_ended():
        done, status = os.waitpid(pid, os.WNOHANG)
        statuses.extend([os.waitstatus_to_exitcode(status)] if done else [])
        return statuses

    eventually(has_ended, "the child has ended")
    assert statuses == [0]


def test_a_balancer_is_of_its_own_process():
    with InProcessGroup(FakeCluster([1]), Worker, enable_load_balancing=True) as group:
        balancer = group.balancer

        def refused():
            uses = (
                balancer.loads,
                lambda: balancer.call("add", 1),
                lambda: list(balancer.map("add", [1])),
                lambda: list(balancer.as_completed("add", [1])),
            )
            for use in uses:
                with pytest.raises(WorkerGroupClosedError, match="that this one was forked from"):
                    use()

        with held(balancer._lock):
            assert_in_child(refused)
        assert balancer.call("add", 1).get_results()


def test_turns_are_of_their_own_process():
    phases = PhaseManager("train", "generate", timeout_s=None)

    def refused():
        with pytest.raises(PhaseError, match="for the process that this one was forked from"):
            phases.turn("generate").__enter__()
        with pytest.raises(PhaseError, match="for the process that this one was forked from"):
            phases.remove("train")
        turn.__exit__(None, None, None)

    turn = phases.turn("train")
    with turn, held(phases._entrance._changed):
        assert_in_child(refused)
    with phases.turn("generate"):
        pass
