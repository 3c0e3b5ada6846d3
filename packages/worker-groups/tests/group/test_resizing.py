"""Groups that get fewer or more workers, in this process; test_resizing_on_ray has the same on Ray."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from patience import eventually

from raycrew.cluster_core import BundlesOccupiedError
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import (
    GroupResizedError,
    NamedSharding,
    Resized,
    UnknownMethodError,
    WorkerFailureError,
    WorkerGroupClosedError,
    WorkerGroupError,
    current_worker,
    per_rank,
    sharded,
)
from raycrew.worker_groups._fan_out import calling
from raycrew.worker_groups._group.resizing import Resizing
from raycrew.worker_groups.testing import InProcessGroup


class Generator:
    """Knows what it heard of generations; one with a higher rank than `last` can't be constructed."""

    def __init__(self, last=99, gate=None, refused=()):
        self.kept, self.gate, self.heard, self.refused = None, gate, [], refused
        if current_worker().rank > last:
            raise ValueError(f"there is no rank {current_worker().rank}")

    def on_generation(self, worker):
        if worker.generation in self.refused:
            raise ValueError(f"generation {worker.generation} is refused")
        self.heard.append((worker.generation, worker.world_size, worker.rank))

    def get_heard(self):
        return self.heard

    def keep(self, value):
        self.kept = value

    def get_kept(self):
        return self.kept

    def leave(self):
        self.kept = "left"

    def wait(self):
        return self.gate.wait(60)

    @sharded("dp")
    def doubled(self, numbers):
        return [2 * number for number in numbers]

    @per_rank
    def own(self, item):
        return current_worker().rank, item


@pytest.fixture
def cluster():
    with FakeCluster([2, 2]) as made:
        yield made


@pytest.fixture
def group(cluster):
    with InProcessGroup(cluster, Generator, workers_per_node=1, enable_load_balancing=True) as made:
        yield made


def test_those_that_stay_keep_rank_and_state_and_all_hear_of_it(group, cluster):
    group.call("keep", "mine").get_results()
    ports = {group.master_port}
    assert group.resize(4) == Resized(added=(2, 3))
    assert group.call("get_kept").get_results() == ["mine", "mine", None, None]
    first, new = [(0, 2), (1, 4)], [(1, 4)]
    heard = group.call("get_heard").get_results()
    assert [[call[:2] for call in rank] for rank in heard] == [first, first, new, new]
    assert [call[-1][2] for call in heard] == [0, 1, 2, 3]
    assert (group.world_size, len(group.workers), group.generation) == (4, 4, 1)
    ports.add(group.master_port)
    assert group.remove_workers(3) == Resized(removed=(1, 2, 3))
    assert group.call("get_heard").get_results() == [[(0, 2, 0), (1, 4, 0), (2, 1, 0)]]
    assert cluster.holders() == {0: ("Generator",)}
    assert group.add_workers() == Resized(added=(1,))
    assert cluster.holders() == {0: ("Generator",), 1: ("Generator",)}, "the first that is free"
    ports |= {group.master_port, group.ranks[1].master_port}
    assert len(ports) == 3


def test_what_is_told_of_the_group_follows(group):
    group.resize(3)
    assert [place.rank for place in group.placements] == [0, 1, 2]
    assert [place.bundle_index for place in group.placements] == [0, 2, 1]
    assert [own["name"] for own in group.worker_metadata] == [
        "Generator-0-0",
        "Generator-1-0",
        "Generator-0-1",
    ]
    assert group.tied_workers_groups == [[0], [1], [2]]
    assert [info.local_rank for info in group.ranks] == [0, 0, 1]
    assert set(group.get_worker_status()) == set(group.get_resource_usage()) == {0, 1, 2}
    assert "3 workers" in repr(group)
    group.resize(1)
    assert set(group.get_worker_status()) == {0}
    assert [place.rank for place in group.placements] == [0]


def test_nothing_changes_where_nothing_is_to(group):
    assert (group.resize(2), group.generation) == (Resized(), 0)


def test_declared_methods_are_split_over_all_that_there_are(cluster):
    axes = NamedSharding([0, 1], ["dp"])
    with InProcessGroup(cluster, Generator, workers_per_node=1, sharding_annotations=axes) as group:
        handle = group.handle()
        group.resize(3)
        assert group.call(Generator.doubled, [1, 2, 3]).get_results() == [2, 4, 6]
        assert handle.call(Generator.own, ["a", "b", "c"]).get_results() == [(0, "a"), (1, "b"), (2, "c")]
        assert group.sharding_annotations == handle.sharding_annotations == NamedSharding([0, 1, 2], ["dp"])
        assert (handle.world_size, handle.generation) == (3, 1)


@pytest.mark.hostile
@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "2", None])
def test_a_number_that_is_none(group, wrong):
    for change in (group.resize, group.add_workers, group.remove_workers):
        with pytest.raises((TypeError, ValueError)):
            change(wrong)
    assert (group.world_size, group.generation) == (2, 0)


@pytest.mark.hostile
@pytest.mark.parametrize("wrong", [None, "1", -1, float("nan"), float("inf"), True])
def test_a_time_that_is_none(group, wrong):
    with pytest.raises((TypeError, ValueError), match=r"^timeout(=| is )"):
        group.remove_workers(timeout=wrong)
    assert (group.world_size, group.generation) == (2, 0)


@pytest.mark.hostile
def test_no_group_is_left_without_workers(group):
    with pytest.raises(ValueError, match="has 2 workers, and would have 0"):
        group.remove_workers(2)
    assert (group.world_size, group.generation) == (2, 0)


@pytest.mark.hostile
def test_parts_of_one_model_are_refused(cluster):
    with (
        InProcessGroup(cluster, Generator, bundle_indices_list=[[0, 1], [2]]) as group,
        pytest.raises(WorkerGroupError, match=r"ranks \[0, 1\] are tied"),
    ):
        group.resize(2)
    axes = NamedSharding([[0, 1]], ["dp", "tp"])
    with (
        InProcessGroup(cluster, Generator, workers_per_node=1, sharding_annotations=axes) as group,
        pytest.raises(ValueError, match="more than one axis"),
    ):
        group.resize(1)


@pytest.mark.hostile
def test_a_failed_start_leaves_the_group_as_it_was(cluster):
    with InProcessGroup(cluster, Generator, workers_per_node=1, last=2) as group:
        with pytest.raises(WorkerFailureError, match="there is no rank 3"):
            group.resize(4)
        assert (group.world_size, group.generation, sorted(cluster.holders())) == (2, 0, [0, 2])
        assert group.call("get_heard").get_results() == [[(0, 2, 0)], [(0, 2, 1)]]
        assert group.resize(3).added == (2,)
        other = cluster.claim([3], "other")
        with pytest.raises(BundlesOccupiedError, match="bundle 3: other"):
            group.add_workers()
        with pytest.raises(ValueError, match="its cluster has 1 besides"):
            group.add_workers(2)
        other.release()
        assert (group.world_size, group.generation, sorted(cluster.holders())) == (3, 1, [0, 1, 2])


@pytest.mark.hostile
def test_a_generation_that_a_rank_refuses_has_the_new_size_and_can_be_begun_again(cluster):
    with InProcessGroup(cluster, Generator, workers_per_node=1, refused=(1, 3)) as group:
        with pytest.raises(WorkerFailureError, match="generation 1 is refused"):
            group.add_workers()
        assert (group.world_size, group.generation, sorted(cluster.holders())) == (3, 1, [0, 1, 2])
        assert group.renew_rendezvous() == 2
        assert [heard[-1][:2] for heard in group.call("get_heard").get_results()] == [(2, 3)] * 3
        with pytest.raises(WorkerFailureError, match="generation 3 is refused"):
            group.remove_workers(2, cleanup_method="leave")
        assert (group.world_size, group.generation, sorted(cluster.holders())) == (1, 3, [0])
        assert group.resize(2).added == (1,)
        assert [heard[-1][:2] for heard in group.call("get_heard").get_results()] == [(4, 2)] * 2


@pytest.mark.hostile
def test_calls_of_those_that_go_are_waited_for_and_cut(cluster):
    gate = threading.Event()
    with InProcessGroup(cluster, Generator, gate=gate) as group, ThreadPoolExecutor(1) as pool:
        waiting = group.on([3]).call("wait")
        removed = pool.submit(group.remove_workers, timeout=60)
        eventually(lambda: group.world_size == 3, "it has left the group")
        assert group.call("get_kept").get_results() == [None] * 3, "the others are called meanwhile"
        assert not removed.done()
        gate.set()
        assert removed.result(60) == Resized(removed=(3,))
        assert waiting.get_results() == [True]
        gate.clear()
        waiting = group.on([2]).call("wait")
        assert group.remove_workers(timeout=0.05) == Resized(removed=(2,), cut=(2,))
        gate.set()


def test_removed_workers_call_a_clean_up_and_others_do_not(group):
    kept = group.instances
    group.resize(4)
    with pytest.raises(UnknownMethodError):
        group.resize(1, cleanup_method="close")
    with pytest.raises(TypeError, match="value"):
        group.remove_workers(cleanup_method="keep")
    assert (group.world_size, group.generation) == (4, 1)
    last = group.instances[-1]
    assert group.remove_workers(cleanup_method="leave").removed == (3,)
    assert [one.kept for one in (*kept, last)] == [None, None, "left"]


def test_what_a_clean_up_of_removed_workers_raises_is_logged(cluster, caplog):
    class Reluctant:
        def leave(self):
            raise OSError("there is no room for what it has")

    with InProcessGroup(cluster, Reluctant) as group:
        assert group.remove_workers(cleanup_method="leave").removed == (3,)
    assert "Reluctant: the clean-up of removed ranks: there is no room for what it has" in caplog.text


@pytest.mark.hostile
def test_calls_that_waited_are_not_sent_to_others_than_they_were_made_for(cluster, monkeypatch):
    building, go_on = threading.Event(), threading.Event()
    with InProcessGroup(cluster, Generator, workers_per_node=1) as group, ThreadPoolExecutor(4) as pool:
        renew, await_replaced, waiting = group._renew, group._life.await_replaced, threading.Semaphore(0)

        def hold(*layout):
            building.set()
            assert go_on.wait(60)
            renew(*layout)

        def await_and_say_so(*asked):
            waiting.release()
            await_replaced(*asked)

        monkeypatch.setattr(group, "_renew", hold)
        removed = pool.submit(group.remove_workers)
        assert building.wait(60)
        monkeypatch.setattr(group._life, "await_replaced", await_and_say_so)
        gone = pool.submit(group.on([1]).call, "get_kept")
        whole = pool.submit(group.call, "get_kept")
        here = pool.submit(group.on([0]).call, "get_kept")
        assert all(waiting.acquire(timeout=60) for _ in range(3)), "all are made for the two that there were"
        go_on.set()
        removed.result(60)
        with pytest.raises(GroupResizedError, match="1 worker by now; a call of get_kept for rank 1"):
            gone.result(60)
        with pytest.raises(GroupResizedError, match="for 2 of 2 ranks"):
            whole.result(60)
        assert here.result(60).get_results() == [None]


@pytest.mark.hostile
def test_threads_that_add_workers_all_do(cluster):
    with InProcessGroup(cluster, Generator, bundle_indices_list=[[0]]) as group:
        with ThreadPoolExecutor(3) as pool:
            added = [one.added for one in pool.map(lambda _: group.add_workers(), range(3))]
        assert (sorted(added), group.world_size, group.generation) == ([(1,), (2,), (3,)], 4, 3)


@pytest.mark.hostile
def test_a_group_that_was_shut_down_gets_no_workers(group, cluster):
    group.shutdown()
    with pytest.raises(WorkerGroupClosedError):
        group.resize(3)
    assert cluster.holders() == {}


def test_streams_and_balanced_calls_go_to_all_that_there_are(group):
    seen, results = set(), group.balancer.as_completed("keep", iter(range(40)), max_outstanding=1)
    for index, _ in results:
        if index == 10:
            group.resize(4)
        if index == 30:
            group.resize(1)
        seen.add(index)
    assert seen == set(range(40))
    assert [load.rank for load in group.balancer.loads()] == [0]
    group.resize(2)
    assert [load.rank for load in group.balancer.loads()] == [0, 1]
    assert {load.outstanding for load in group.balancer.loads()} == {0}


@pytest.mark.parametrize(
    ("least", "replaced", "absent"),
    [(None, {1}, ()), (3, {1}, (1,)), (3, {2, 1}, ()), (2, {2, 1}, (1, 2)), (4, set(), ()), (1, set(), ())],
)
def test_a_group_goes_on_without_some_as_long_as_enough_are_left(least, replaced, absent):
    group = SimpleNamespace(
        _spec=SimpleNamespace(options=SimpleNamespace(min_workers=least)),
        _life=SimpleNamespace(replaced=frozenset(replaced)),
        _started=SimpleNamespace(ranks=[None] * 4),
    )
    assert Resizing.absent_ranks.fget(group) == absent


@pytest.mark.parametrize("least", [1, 2])
def test_as_many_may_be_needed_as_there_are(least):
    with InProcessGroup(FakeCluster([2]), object, restart_on_failure=True, min_workers=least) as group:
        assert group.world_size == 2


def test_ranks_that_are_tied_can_not_be_missed():
    tied = {"bundle_indices_list": [[0], [1, 2]]}
    with pytest.raises(ValueError, match=r"ranks that need no others; \[1, 2\] are tied"):
        InProcessGroup(FakeCluster([3]), object, restart_on_failure=True, min_workers=1, **tied)


class Steps:
    def double(self, x):
        return 2 * x


def test_numbers_of_workers_and_of_items_may_be_numpys():
    two = pytest.importorskip("numpy").int64(2)
    with InProcessGroup(FakeCluster([4]), Steps, workers_per_node=1, enable_load_balancing=True) as group:
        assert group.add_workers(two).added == (1, 2)
        assert group.resize(two).removed == (2,)
        doubled = group.balancer.map("double", [1, 2, 3], max_outstanding=two, window=two)
        assert (list(doubled), group.world_size) == ([2, 4, 6], 2)
    calling._check_count("batch_size", two, least=1)
