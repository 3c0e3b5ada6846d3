"""What a scheduler refuses at once, and by which error: mistaken arguments, other processes, connections."""

import copy
import math
import os
import pickle

import pytest

from raycrew.cluster_core import RayConnection, Session
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups.scheduling import (
    EngineCallError,
    EngineCreationError,
    Job,
    RayScheduler,
    SchedulerClosedError,
    WorkerCreationError,
    _sites,
)
from raycrew.worker_groups.testing import InProcessGroup

ECHO = "engines.Echo"


@pytest.fixture
def cluster():
    return FakeCluster([2])


@pytest.fixture
def scheduler(cluster):
    with RayScheduler(cluster, group_class=InProcessGroup, call_timeout_s=60.0) as made:
        made.create_workers(Job("actor", 1))
        made.create_engine("actor/0", ECHO, None, "hey")
        yield made


TIMED = {
    "create_workers": lambda scheduler, time: scheduler.create_workers(Job("ref", 1), time),
    "fork_workers": lambda scheduler, time: scheduler.fork_workers("ref", "actor", timeout_s=time),
    "get_workers": lambda scheduler, time: scheduler.get_workers("actor", time),
    "delete_workers": lambda scheduler, time: scheduler.delete_workers("actor", timeout=time),
    "ping": lambda scheduler, time: scheduler.ping("actor/0", time),
    "alloc_ports": lambda scheduler, time: scheduler.alloc_ports("actor/0", timeout_s=time),
    "create_engine": lambda scheduler, time: scheduler.create_engine("actor/0", ECHO, "b", timeout_s=time),
    "call_engine": lambda scheduler, time: scheduler.call_engine("actor/0", "say", timeout_s=time),
    "destroy_engine": lambda scheduler, time: scheduler.destroy_engine("actor/0", timeout_s=time),
}


@pytest.mark.parametrize("use", TIMED.values(), ids=TIMED)
def test_times_are_finite_numbers_that_may_be_large(scheduler, use):
    for time in (math.inf, math.nan, -1):
        with pytest.raises(ValueError, match="not a finite number of seconds"):
            use(scheduler, time)
    for time in ("5", True):
        with pytest.raises(TypeError, match="a number of seconds"):
            use(scheduler, time)
    use(scheduler, 1e12)


def test_a_scheduler_checks_its_own_times(cluster):
    with pytest.raises(ValueError, match="startup_timeout_s"):
        RayScheduler(cluster, startup_timeout_s=math.nan)
    with pytest.raises(ValueError, match="call_timeout_s"):
        RayScheduler(cluster, call_timeout_s=math.inf)


def test_a_first_argument_in_place_of_the_engine_s_name_is_refused(scheduler):
    for use in (scheduler.call_engine, scheduler.create_engine):
        with pytest.raises(TypeError, match="not 5; arguments of the engine come after it"):
            use("actor/0", "engines.Echo", 5)
    with pytest.raises(TypeError, match="engine_name"):
        scheduler.destroy_engine("actor/0", 5)


def test_what_is_no_id_and_no_job_is_refused(scheduler):
    with pytest.raises(TypeError, match="'rollout/0', not 5"):
        scheduler.ping(5)
    with pytest.raises(TypeError, match="a Job, not for 'ref'"):
        scheduler.create_workers("ref")


class Unpicklable(InProcessGroup):
    """What is sent has one argument, and that can't be pickled."""

    def _deliver(self, dispatch, timeout):
        if any(isinstance(value, set) for send in dispatch.sends for value in send.args):
            raise TypeError("Could not serialize the argument\n" + "=" * 1000)
        return super()._deliver(dispatch, timeout)


def test_arguments_that_can_not_be_sent_are_errors_of_the_call(cluster):
    with RayScheduler(cluster, group_class=Unpicklable, call_timeout_s=60.0) as scheduler:
        (one,) = scheduler.create_workers(Job("actor", 1))
        with pytest.raises(
            EngineCreationError, match="actor/0: create_engine failed: an argument can't be sent"
        ):
            scheduler.create_engine(one, ECHO, None, set())
        scheduler.create_engine(one, ECHO)
        with pytest.raises(
            EngineCallError, match="say failed: an argument can't be sent: Could not"
        ) as caught:
            scheduler.call_engine(one, "say", None, set())
        assert "=" not in str(caught.value)
        assert isinstance(caught.value.cause, TypeError)


def test_a_scheduler_does_not_travel(scheduler):
    for way in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="stays in its process"):
            way(scheduler)


def test_a_forked_process_is_refused_and_ends_nothing(scheduler, cluster):
    uses = [
        lambda: scheduler.call_engine("actor/0", "say"),
        lambda: scheduler.create_workers(Job("ref", 1)),
        lambda: scheduler.get_workers("actor"),
        lambda: scheduler.delete_workers("actor"),
        lambda: scheduler.delete_workers(),
    ]
    with scheduler._roles._changed:  # as another thread may have it
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if all(map(is_refused, uses)) and not scheduler.close() and repr(scheduler) else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert scheduler.call_engine("actor/0", "say")[0] == "hey"
    assert cluster.holders() == {0: ("actor",)}


def is_refused(use):
    try:
        use()
    except SchedulerClosedError as error:
        return "forked from" in str(error)
    return False


def test_over_another_connection_nothing_is_created(monkeypatch):
    monkeypatch.setattr(_sites, "RayVirtualCluster", lambda *_, **__: FakeCluster([1]))
    connection = RayConnection.__new__(RayConnection)
    connection.session = Session("the first one")
    scheduler = RayScheduler(connection, group_class=InProcessGroup)
    with pytest.raises(WorkerCreationError, match="the first one, has ended"):
        scheduler.create_workers(Job("actor", 1))
