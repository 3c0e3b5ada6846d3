import os
import pathlib
import signal
import subprocess
import sys
import time
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S, eventually

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import connected
from raycrew.worker_groups import RayWorkerGroup, WorkerFailureError
from raycrew.worker_groups.balancing import LoadBalancer, ProcessUsage, WorkerLoad, strategy_of
from raycrew.worker_groups.balancing._strategies import key_bytes
from raycrew.worker_groups.balancing._stream import LostWorkerError, Stream
from raycrew.worker_groups.errors import ResultTimeoutError, WorkerGroupError

KEYS = st.recursive(st.text() | st.binary() | st.integers(), lambda k: st.tuples(k, k))


RankInfoStub = namedtuple("RankInfoStub", "rank generation", defaults=[0])


def loads_of(*outstanding, usage=None):
    return [WorkerLoad(i, n, usage and usage[i]) for i, n in enumerate(outstanding)]


# Strategies


def test_round_robin_takes_turns_and_skips_those_who_are_not_offered():
    strategy = strategy_of("round_robin")
    loads = loads_of(0, 0, 0)
    assert [strategy.choose(loads, None) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert [strategy.choose(loads[:2], None) for _ in range(2)] == [0, 1]


def test_least_outstanding_takes_turns_among_equals():
    strategy = strategy_of("least_outstanding")
    assert strategy.choose(loads_of(2, 1, 3), None) == 1
    assert [strategy.choose(loads_of(0, 0, 5), None) for _ in range(4)] == [0, 1, 0, 1]


def test_least_loaded_goes_by_reports_and_does_not_send_everything_to_one_between_two():
    strategy = strategy_of("least_loaded")
    assert strategy.choose(loads_of(0, 9, 0, usage=[0.9, 0.2, 0.8]), None) == 1
    sent = Counter()
    for _ in range(30):
        loads = [WorkerLoad(i, sent[i], usage, sent[i]) for i, usage in enumerate([0.1, 0.6])]
        sent[strategy.choose(loads, None)] += 1
    assert sent[0] > sent[1] > 5


@given(st.lists(KEYS, min_size=1, unique_by=key_bytes), st.integers(2, 8), st.data())
def test_consistent_hash_moves_only_the_keys_of_a_lost_worker(keys, n, data):
    loads = loads_of(*[0] * n)
    lost = data.draw(st.integers(0, n - 1))
    rest = [load for load in loads if load.rank != lost]
    before = [strategy_of("consistent_hash").choose(loads, key) for key in keys]
    one = strategy_of("consistent_hash")
    after = [one.choose(rest, key) for key in keys]
    again = [one.choose(loads, key) for key in keys]
    assert again == before
    assert all(b in (a, lost) for a, b in zip(after, before, strict=True))
    assert lost not in after


def test_consistent_hash_serves_several_threads():
    strategy = strategy_of("consistent_hash")

    def choose(ranks):
        loads = [WorkerLoad(rank) for rank in ranks]
        return all(strategy.choose(loads, f"key {i}") in ranks for i in range(100))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(choose, [(0, 1), (2, 3), (4,), (0, 5)] * 5))


def test_consistent_hash_spreads_keys_over_all_workers():
    strategy = strategy_of("consistent_hash")
    share = Counter(strategy.choose(loads_of(0, 0, 0, 0), f"conversation {i}") for i in range(4000))
    assert len(share) == 4
    assert min(share.values()) > 500


@given(KEYS, KEYS)
def test_different_keys_are_different_bytes(one, other):
    def shape(key):
        # Equal to Python, and different keys here: True and 1 do not come from KEYS.
        return (type(key).__name__, tuple(map(shape, key)) if isinstance(key, tuple) else key)

    assert (key_bytes(one) == key_bytes(other)) == (shape(one) == shape(other))


def test_a_function_can_be_a_strategy_and_is_held_to_what_it_was_offered():
    assert strategy_of(lambda loads, key: loads[-1].rank).choose(loads_of(0, 0), "k") == 1
    with pytest.raises(ValueError, match=r"chose rank 7, it was offered \[0, 1\]"):
        strategy_of(lambda loads, key: 7).choose(loads_of(0, 0), None)


@pytest.mark.parametrize(
    ("which", "error", "says"), [("fastest", ValueError, "round_robin, least"), (3, TypeError, "function")]
)
def test_unknown_strategies_are_refused(which, error, says):
    with pytest.raises(error, match=says):
        strategy_of(which)


# Streams, over workers that are a list


class FakeWorkers:
    """Workers that finish in an order that the test decides, and can be lost."""

    def __init__(self, n, pick=lambda sent: sent[0]):
        self.ranks = list(range(n))
        self.pick = pick
        self.log = []
        self.most = Counter()
        self.held = Counter()
        self.abandoned = []
        self.loses = {}

    def loads(self):
        return [WorkerLoad(rank, self.held[rank]) for rank in self.ranks]

    def send(self, rank, item):
        assert rank in self.ranks
        self.held[rank] += 1
        self.most[rank] = max(self.most[rank], self.held[rank])
        self.log.append((rank, item.index))
        return (len(self.log), rank, item.value)

    def wait(self, sent):
        return [self.pick(sent)]

    def collect(self, sent):
        _, rank, value = sent
        self.held[rank] -= 1
        if self.loses.get(value, 0):
            self.loses[value] -= 1
            self.ranks.remove(rank)
            raise LostWorkerError from WorkerFailureError(f"rank {rank} died")
        if rank not in self.ranks:
            raise LostWorkerError from WorkerFailureError(f"rank {rank} died")
        return value * 10

    def abandon(self, sent):
        self.abandoned += sent


def stream_over(workers, items, strategy="round_robin", *, key=lambda item: item, most=2, window=None):
    return Stream(workers, strategy_of(strategy), items, key, most, window)


@given(
    st.integers(1, 4),
    st.integers(0, 40),
    st.integers(1, 3),
    st.randoms(),
    st.sampled_from(["round_robin", "consistent_hash"]),
)
def test_every_item_is_answered_once_and_no_worker_holds_too_many(n, count, most, random, strategy):
    workers = FakeWorkers(n, random.choice)
    pairs = list(stream_over(workers, range(count), strategy, most=most).pairs())
    assert sorted(pairs) == [(i, i * 10) for i in range(count)]
    assert all(held <= most for held in workers.most.values())
    assert workers.abandoned == []


def test_the_same_key_goes_to_the_same_worker_even_when_that_one_is_full():
    workers = FakeWorkers(3)
    list(stream_over(workers, range(60), "consistent_hash", key=lambda i: i % 5, most=1).pairs())
    by_key = {}
    for rank, index in workers.log:
        by_key.setdefault(index % 5, set()).add(rank)
    assert all(len(ranks) == 1 for ranks in by_key.values())


def test_the_source_is_read_only_as_far_as_workers_and_window_allow():
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield read[-1]

    stream = stream_over(FakeWorkers(2, lambda sent: sent[-1]), endless(), window=6)
    pairs = stream.pairs()
    for _ in range(5):  # the first item is never done: everything else in the window is
        next(pairs)
    assert len(read) == 6
    pairs.close()


def test_a_slow_worker_gets_fewer_items():
    workers = FakeWorkers(2, lambda sent: next((one for one in sent if one[1] == 1), sent[0]))
    list(stream_over(workers, range(50)).pairs())
    ranks = Counter(rank for rank, _ in workers.log)
    assert ranks == {0: 2, 1: 48}


def test_items_of_a_lost_worker_go_to_another_one():
    workers = FakeWorkers(3)
    workers.loses = {4: 1}
    pairs = list(stream_over(workers, range(20)).pairs())
    assert sorted(pairs) == [(i, i * 10) for i in range(20)]
    assert len(workers.ranks) == 2


def test_an_item_that_ends_every_worker_ends_only_two_of_them():
    workers = FakeWorkers(4)
    workers.loses = {4: 9}
    with pytest.raises(WorkerFailureError, match="died"):
        list(stream_over(workers, range(20), most=1).pairs())
    assert len(workers.ranks) == 2


def test_closing_a_stream_abandons_what_is_left():
    workers = FakeWorkers(2)
    pairs = stream_over(workers, range(20)).pairs()
    next(pairs)
    pairs.close()
    assert len(workers.abandoned) == 3


class IdleGroup:
    """Three ranks that nobody calls."""

    name = "idle"
    ranks = tuple(RankInfoStub(rank) for rank in range(3))
    tied_workers_groups = ((0,), (1,), (2,))


@pytest.mark.parametrize("strategy", ["round_robin", "least_outstanding", "consistent_hash", "least_loaded"])
def test_only_least_loaded_asks_for_reports(strategy):
    asked = []
    balancer = LoadBalancer(IdleGroup(), strategy, usage=lambda: asked.append("report") or {1: 0.5})
    usage = [load.usage for load in balancer.loads()]
    assert (usage, asked) == (
        ([None, 0.5, None], ["report"]) if strategy == "least_loaded" else ([None] * 3, [])
    )


# Over a group


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
        eventually(lambda: usage().get(1, 0) > 0.1, "the busy child of rank 1 shows")
        assert usage()[0] < usage()[1]
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
