import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple

import pytest
import ray
from patience import PATIENCE_S, eventually

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import connected
from raycrew.worker_groups import RayWorkerGroup, WorkerFailureError
from raycrew.worker_groups.balancing import LoadBalancer, ProcessUsage
from raycrew.worker_groups.errors import GroupResizedError, ResultTimeoutError, WorkerGroupError

RankInfoStub = namedtuple("RankInfoStub", "rank generation", defaults=[0])


class IdleGroup:
    """Three ranks that nobody calls."""

    name = "idle"
    ranks = tuple(RankInfoStub(rank) for rank in range(3))
    tied_workers_groups = ((0,), (1,), (2,))


def last(loads, key):
    return loads[-1].rank


class Idlest:
    needs_usage = True

    def __call__(self, loads, key):
        return min(loads, key=lambda load: load.usage or 0.0).rank


@pytest.mark.parametrize(
    ("strategy", "asks"),
    [
        ("round_robin", False),
        ("least_outstanding", False),
        ("consistent_hash", False),
        ("least_loaded", True),
        (last, False),
        (Idlest(), True),
    ],
)
def test_only_who_needs_reports_asks_for_them(strategy, asks):
    asked = []
    balancer = LoadBalancer(IdleGroup(), strategy, usage=lambda: asked.append("report") or {1: 0.5})
    usage = [load.usage for load in balancer.loads()]
    assert (usage, asked) == (([None, 0.5, None], ["report"]) if asks else ([None] * 3, []))


def test_workers_that_are_absent_are_left_out():
    balancer = LoadBalancer(IdleGroup(), absent=lambda: (1,))
    assert [load.rank for load in balancer.loads()] == [0, 2]


class Answer:
    """What becomes of one call."""

    def __init__(self, value, error=None):
        self.value, self.error, self._ends, self._places = value, error, [object()], {}

    def _wait_for(self, ends, count, timeout_s, *, fetch_local):
        return ends[:count]

    def get_results(self):
        if self.error is not None:
            raise self.error
        return [self.value]

    def cancel(self):
        """It has ended."""

    def _died(self, end):
        return False


class BeingReplaced(IdleGroup):
    """Rank 0 is being replaced: a call on it waits until that is over, and then finds no such method."""

    def __init__(self):
        self.is_asked, self.is_over = threading.Event(), threading.Event()

    def on(self, ranks, timeout=None):
        if ranks == [0]:
            self.is_asked.set()
            assert self.is_over.wait(PATIENCE_S)
            raise AttributeError("no such method")
        return self

    def call(self, method):
        return Answer(method)


def test_a_call_that_waits_for_its_worker_keeps_no_other_call_waiting():
    group, errors = BeingReplaced(), []
    balancer = LoadBalancer(group, "least_outstanding")

    def call():
        with pytest.raises(AttributeError) as error:
            balancer.call("answer")
        errors.append(error)

    waiting = threading.Thread(target=call)
    waiting.start()
    assert group.is_asked.wait(PATIENCE_S)
    assert [balancer.call("answer").value for _ in range(2)] == ["answer"] * 2
    assert waiting.is_alive()
    assert [load.outstanding for load in balancer.loads()] == [1, 0, 0]
    group.is_over.set()
    waiting.join(PATIENCE_S)
    assert (len(errors), [load.outstanding for load in balancer.loads()]) == (1, [0, 0, 0])


class Resized(IdleGroup):
    """A group whose first calls are lost with their workers, and whose size is another one by then."""

    def __init__(self, n_lost):
        self.lost = n_lost

    def on(self, ranks, timeout=None):
        return self

    def call(self, method, item):
        self.lost -= 1
        return Answer(item, GroupResizedError("it has 1 workers by now") if self.lost >= 0 else None)


@pytest.mark.hostile
def test_an_item_that_was_lost_before_a_change_of_size_goes_to_another():
    balancer = LoadBalancer(Resized(1), idempotent_methods=["answer"])
    assert list(balancer.map("answer", "abc")) == ["a", "b", "c"]
    assert {load.outstanding for load in balancer.loads()} == {0}
    with pytest.raises(GroupResizedError):
        list(LoadBalancer(Resized(9), idempotent_methods=["answer"]).map("answer", "a"))


class Restarted(IdleGroup):
    """Its workers die at each call, which is known of those in `known`; a restart replaces all of them."""

    name, generation = "restarted", 1

    def __init__(self):
        self.known = []

    @property
    def ranks(self):
        return [RankInfoStub(rank, self.generation) for rank in range(3)]

    def on(self, ranks, timeout=None):
        return self

    def call(self, method):
        return Dead(self.known)


class Dead(Answer):
    """A call whose worker has died."""

    def _wait_for(self, ends, count, timeout_s, *, fetch_local):
        return [end for end in ends if end in self.value]

    def _died(self, end):
        return True

    def _note_loss(self):
        """Nobody is told."""


@pytest.mark.hostile
def test_a_death_that_is_known_late_does_not_revive_who_has_died_since():
    group = Restarted()
    balancer = LoadBalancer(group, lambda loads, key: 0)
    first = balancer.call("answer")
    group.generation = 2
    second = balancer.call("answer")
    for dead in (second, first):
        group.known += dead._ends
        assert [load.rank for load in balancer.loads()] == [1, 2]


class Server:
    def pid(self, item=None):
        return os.getpid()

    def square(self, item, offset=0):
        return item * item + offset

    def fail(self, item):
        if item == 3:
            raise ValueError("three")
        return item

    def die(self):
        os._exit(1)

    def die_once(self, item, marker):
        if item == 3:
            with pathlib.Path(marker).open("a") as file:
                file.write(".")
                file.flush()
                if file.tell() == 1:
                    os._exit(1)
        return item

    def wait_for(self, path):
        deadline = time.monotonic() + PATIENCE_S
        while not pathlib.Path(path).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return path


@ray.remote(num_cpus=0)
class Caller:
    """Calls workers by the balancer of a handle, in its event loop."""

    async def call(self, handle, times):
        warnings = []

        class Noting(logging.Handler):
            def emit(self, record):
                warnings.append(record.getMessage())

        logging.getLogger("ray").addHandler(Noting(logging.WARNING))
        pids = {(await handle.balancer.call("pid"))[0] for _ in range(times)}
        return len(pids), warnings


@pytest.fixture(scope="module")
def connection(local_ray_session):
    with connected(local_ray_session):
        yield


@pytest.fixture(scope="module")
def group(connection):
    with RayVirtualCluster([3], use_gpus=False) as cluster, RayWorkerGroup(cluster, Server) as made:
        yield made


@pytest.fixture
def mortal(connection):
    """A group whose workers the test may end."""
    with RayVirtualCluster([3], use_gpus=False) as cluster, RayWorkerGroup(cluster, Server) as made:
        yield made


@pytest.mark.smoke
def test_a_group_serves_calls_and_streams(group):
    balancer = LoadBalancer(group)
    pids = group.call("pid").get_results()
    assert [balancer.call("pid").get_results()[0] for _ in range(6)] == pids * 2
    assert list(balancer.map("square", range(50))) == [i * i for i in range(50)]
    assert list(balancer.map("square", range(3), common_kwargs={"offset": 1})) == [1, 2, 5]
    assert sorted(balancer.as_completed("square", (i for i in range(20)))) == [(i, i * i) for i in range(20)]
    assert [load.outstanding for load in balancer.loads()] == [0, 0, 0]
    with pytest.raises(WorkerFailureError, match="three"):
        list(balancer.map("fail", range(10)))
    assert [load.outstanding for load in balancer.loads()] == [0, 0, 0]
    by_key = LoadBalancer(group, "consistent_hash")
    assert len({by_key.call("pid", key="conversation").get_results()[0] for _ in range(5)}) == 1
    with pytest.raises(TypeError, match="a key is"):
        by_key.call("pid")
    assert len(set(by_key.map("pid", range(100)))) == 3


def test_nobody_is_warned_of_an_event_loop_that_is_not_blocked(connection):
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Server, enable_load_balancing=True) as group,
    ):
        assert ray.get(Caller.remote().call.remote(group.handle(), 4)) == (2, [])


def test_least_outstanding_avoids_a_busy_worker(group, tmp_path):
    balancer = LoadBalancer(group, "least_outstanding")
    pids = group.call("pid").get_results()
    gate = tmp_path / "gate"
    busy = balancer.call("wait_for", str(gate))
    assert balancer.loads()[0].outstanding == 1
    answers = {balancer.call("pid").get_results()[0] for _ in range(8)}
    assert answers == set(pids[1:])
    with pytest.raises(ResultTimeoutError):
        list(balancer.map("wait_for", [str(gate)], timeout=0.5))
    gate.touch()
    assert busy.get_results() == [str(gate)]


def test_usage_reports_steer_least_loaded(group):
    balancer = LoadBalancer(group, "least_loaded", usage=lambda: {0: 0.9, 1: 0.0, 2: 0.9})
    pids = group.call("pid").get_results()
    assert {balancer.call("pid").get_results()[0] for _ in range(3)} == {pids[1]}
    balancer = LoadBalancer(group, Idlest(), usage=lambda: {0: 0.9, 1: 0.8, 2: 0.0})
    assert {balancer.call("pid").get_results()[0] for _ in range(3)} == {pids[2]}


def test_a_group_can_bring_its_balancer_along(connection):
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        with pytest.raises(ValueError, match="no load balancing strategy"):
            RayWorkerGroup(cluster, Server, enable_load_balancing=True, load_balancing_strategy="fastest")
        with RayWorkerGroup(
            cluster,
            Server,
            enable_load_balancing=True,
            load_balancing_strategy="least_loaded",
            idempotent_methods=["die_once"],
        ) as group:
            assert list(group.balancer.map("square", range(9))) == [i * i for i in range(9)]
            assert group.balancer.may_go_again("die_once")


def test_without_load_balancing_a_group_says_how_to_get_it(group):
    with pytest.raises(ValueError, match="enable_load_balancing=True"):
        group.balancer.call("pid")


def test_the_use_of_processes_is_reported_by_rank(connection):
    (node,) = ray.nodes()
    spin = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    program = [sys.executable, "-c"]
    busy = subprocess.Popen([*program, spin], start_new_session=True)
    idle = subprocess.Popen([*program, "import time; time.sleep(1000)"])
    try:
        usage = ProcessUsage({0: (node["NodeID"], idle.pid), 1: (node["NodeID"], busy.pid)})
        eventually(
            lambda: (now := usage()).get(0, 1) < now.get(1, 0) > 0.1,  # its start takes the idle one a moment
            "the busy child of rank 1 shows",
        )
        idle.kill()
        idle.wait()
        eventually(lambda: 0 not in usage(), "a process that is gone reports nothing")
    finally:
        os.killpg(busy.pid, signal.SIGKILL)
        busy.wait()
        idle.kill()


def test_items_of_a_dead_worker_go_again_only_if_the_method_is_idempotent(mortal, tmp_path):
    marker = {"marker": str(tmp_path / "one")}
    balancer = LoadBalancer(mortal, idempotent_methods=["die_once"])
    assert list(balancer.map("die_once", range(20), common_kwargs=marker)) == list(range(20))
    assert len(balancer.loads()) == 2
    assert set(balancer.map("square", range(4))) == {0, 1, 4, 9}
    marker = {"marker": str(tmp_path / "two")}
    with pytest.raises(WorkerFailureError, match="died"):
        list(LoadBalancer(mortal).map("die_once", range(20), common_kwargs=marker))


def test_dead_workers_get_no_more_calls_and_without_any_it_says_so(mortal):
    balancer = LoadBalancer(mortal)
    for left in (2, 1, 0):
        with pytest.raises(WorkerFailureError, match="died"):
            balancer.call("die").get_results()
        if left:
            assert len(balancer.loads()) == left
    with pytest.raises(WorkerGroupError, match="every worker of 'Server' is lost"):
        balancer.call("pid")


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"strategy": "least_loaded"}, ValueError, "usage="),
        ({"idempotent_methods": "square"}, TypeError, r"\['square'\]"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        LoadBalancer(None, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error"), [({"max_outstanding": 0}, ValueError), ({"max_outstanding": 1.5}, TypeError)]
)
def test_bad_limits_are_refused_before_the_first_item(arguments, error):
    with pytest.raises(error, match="max_outstanding"):
        LoadBalancer(None).as_completed("square", [1], **arguments)
