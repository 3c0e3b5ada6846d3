import asyncio
import threading

import pytest
from workers import AsyncWorker, Configured, Decorated, Worker

from raycrew.cluster_core import BundlesOccupiedError, Occupant
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import (
    NamedSharding,
    ResultTimeoutError,
    UnknownMethodError,
    WorkerFailureError,
    WorkerFailuresError,
    WorkerGroupClosedError,
    WorkerGroupError,
    current_worker,
)
from raycrew.worker_groups.testing import InProcessGroup


@pytest.fixture
def cluster():
    return FakeCluster([2, 2])


@pytest.fixture
def group(cluster):
    with InProcessGroup(cluster, Worker, base=10) as made:
        yield made


@pytest.mark.smoke
def test_it_is_called_like_a_group_on_ray(group):
    assert group.call(Worker.add, 1, z=2).get_results() == [13] * 4
    assert [w.rank for w in group.call("where").get_results()] == [0, 1, 2, 3]
    assert [(w.node_rank, w.local_rank) for w in group.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert group.run_all_workers_multiple_data("add", [1, 2, 3, 4]).get_results() == [11, 12, 13, 14]
    assert group.on(ranks=[3]).call("add", 1).get_results() == [11]
    assert sorted(group.call("count_to", 2).as_completed()) == [(r, i) for r in range(4) for i in range(2)]
    assert sorted(group.on(ranks=[1]).stream(Worker.count_to, 2)) == [(1, 0), (1, 1)]
    assert group.call("total", group.call("add", 1)).get_results() == [44] * 4
    assert isinstance(group, Occupant)


def test_workers_run_at_the_same_time_on_threads_of_their_own(cluster):
    barrier = threading.Barrier(4)

    class Meeting:
        def meet(self):
            barrier.wait(60)
            return threading.current_thread().name, current_worker().rank

    with InProcessGroup(cluster, Meeting, name_prefix="m") as group:
        assert group.call("meet").get_results() == [(f"m-{rank}_0", rank) for rank in range(4)]


def test_failures_are_attributed(group, tmp_path):
    with pytest.raises(WorkerFailureError, match=r"rank 2 of 'Worker'.*told to fail") as caught:
        group.call("fail_on", [2]).get_results()
    assert (caught.value.rank, caught.value.method) == (2, "fail_on")
    with pytest.raises(UnknownMethodError):
        group.call("nope")
    with pytest.raises(ResultTimeoutError) as late:
        group.on(ranks=[1]).call("wait_for", str(tmp_path / "gate")).get_results(timeout=0.01)
    (tmp_path / "gate").touch()
    assert late.value.pending == (1,)
    with pytest.raises(TypeError, match="add is sync, not a generator"):
        group.stream("add", 1)
    assert sorted(group.stream(Worker.count_to, 2)) == sorted(
        (rank, i) for rank in range(4) for i in range(2)
    )
    with pytest.raises(TypeError, match="generator method"):
        group.call("total", group.call("count_to", 2))


def test_an_init_that_raises_frees_the_bundles(cluster):
    class Broken:
        def __init__(self):
            raise RuntimeError("not today")

    with pytest.raises((WorkerFailureError, WorkerFailuresError), match="not today"):
        InProcessGroup(cluster, Broken)
    with InProcessGroup(cluster, Worker), pytest.raises(BundlesOccupiedError):
        InProcessGroup(cluster, Worker)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bsae'"):
        InProcessGroup(cluster, Worker, bsae=1)


def test_layouts_and_axes(cluster):
    sharding = NamedSharding([[0, 1], [2, 3]], ["dp", "tp"])
    with InProcessGroup(cluster, Worker, sharding_annotations=sharding) as group:
        future = group.run_all_workers_sharded_data("echo", ["a", "b"], in_sharded_axes=["dp"])
        assert future.get_results() == [(0, ("a",), {}), (2, ("b",), {})]
    with InProcessGroup(cluster, Configured, bundle_indices_list=[(1, [1, 0]), (0, [0])]) as group:
        assert group.tied_workers_groups == [[0, 1], [2]]
        assert [told for told, *_ in group.call("answer").get_results()] == [
            (0, (1, [1, 0]), 0),
            (0, None, 0),
            (0, (0, [0]), 0),
        ]
        assert group.on(leaders=True).call("answer").called_workers == [0, 2]
        assert [p.bundle_index for p in group.placements] == [3, 2, 0]


def test_typed_calls_with_sharded_data(cluster):
    sharding = NamedSharding([[0, 1], [2, 3]], ["dp", "tp"])
    with InProcessGroup(cluster, Worker, sharding_annotations=sharding) as group:
        future = group.on(timeout=60).call_sharded(
            Worker.echo,
            ["a", "b"],
            in_sharded_axes=["dp"],
            replicate_on_axes=["tp"],
            output_is_replicated=["tp"],
            timeout=[1, 2],
        )
        assert future.called_workers == [0, 1, 2, 3]
        assert future.get_results() == [(0, ("a",), {"timeout": 1}), (2, ("b",), {"timeout": 2})]
        with pytest.raises(ValueError, match="3 items"):
            group.call_sharded("echo", [1, 2, 3], in_sharded_axes=["dp"])
        for some in (group.on(ranks=[0]), group.on(leaders=True)):
            with pytest.raises(ValueError, match="whole group"):
                some.call_sharded("echo", [1, 2], in_sharded_axes=["dp"])
    with InProcessGroup(cluster, Worker) as group, pytest.raises(ValueError, match="sharding_annotations"):
        group.call_sharded(Worker.echo, [1, 2], in_sharded_axes=["dp"])


def test_async_and_decorated_workers(cluster):
    with InProcessGroup(cluster, AsyncWorker, [1, 0]) as group:
        assert group.call("slowly", 3).get_results() == [3]
        assert group.call("count_to", 2).get_results() == [[0, 1]]

        async def awaited():
            return await group.call("slowly", 4)

        assert asyncio.run(awaited()) == [4]
    with InProcessGroup(cluster, Decorated, name="x") as group:
        assert group.call("get_name").get_results() == ["x"] * 4


def test_its_end(cluster):
    group = InProcessGroup(cluster, Worker)
    assert [type(worker) for worker in group.instances] == [Worker] * 4
    assert not group.shutdown("fail_to_clean")
    assert group.shutdown()
    with pytest.raises(WorkerGroupClosedError):
        group.call("pid")
    assert cluster.holders() == {}


def test_outside_of_workers_there_is_no_current_one():
    with pytest.raises(WorkerGroupError, match="inside a worker"):
        current_worker()
