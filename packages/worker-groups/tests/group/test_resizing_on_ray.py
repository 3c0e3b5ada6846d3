"""Groups on Ray that get fewer or more workers; test_resizing has what needs no processes."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from patience import eventually, is_running
from ray import cloudpickle
from resized_workers import AsyncGenerator, Generator

from raycrew.cluster_core import BundlesOccupiedError, RayVirtualCluster
from raycrew.worker_groups import (
    RayWorkerGroup,
    Resized,
    WorkerFailureError,
    WorkerGroupClosedError,
    WorkerGroupError,
)
from raycrew.worker_groups._group.handles import routes
from raycrew.worker_groups._health import look

pytestmark = pytest.mark.hostile


@pytest.fixture
def cluster(local_ray):
    with RayVirtualCluster([4], use_gpus=False) as made:
        yield made


@pytest.fixture
def group(cluster, tmp_path):
    with RayWorkerGroup(
        cluster,
        Generator,
        workers_per_node=2,
        folder=str(tmp_path),
        enable_load_balancing=True,
        secrets=["TOKEN"],
        on_worker_failure=print,
    ) as made:
        yield made


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("TOKEN", "hidden")


def places(group):
    """What workers know themselves."""
    told = group.call("where").get_results(timeout=60)
    return [(w.rank, w.world_size, w.generation, w.bundle_index, int(port)) for w, port, _ in told]


def test_it_grows_and_shrinks_while_it_is_used(group, cluster, tmp_path):
    handle, first = group.handle(), group.call("pid").get_results()
    assert group.resize(4) == Resized(added=(2, 3))
    port = group.master_port
    assert places(group) == [(rank, 4, 1, rank, port) for rank in range(4)]
    assert [secret for _, _, secret in group.call("where").get_results()] == ["hidden"] * 4
    assert group.call("pid").get_results()[:2] == first, "those that were there stay"
    assert group.call("get_heard").get_results()[::3] == [[(0, 2), (1, 4)], [(1, 4)]]
    assert set(group.get_worker_status(timeout=60).values()) == {"ready"}
    assert sorted(cluster.holders()) == [0, 1, 2, 3]
    (shown,) = look(10.0, [group.name])
    assert [one.worker.rank for one in shown.ranks] == [0, 1, 2, 3]
    assert handle.refresh() == 1
    assert handle.call("rank").get_results() == [0, 1, 2, 3]
    copy = pickle.loads(cloudpickle.dumps(group))
    assert copy.call("rank").get_results() == [0, 1, 2, 3]
    with pytest.raises(WorkerGroupError, match=r"resize\(\).* is for the process that made it"):
        copy.resize(1)

    gone = group.call("pid").get_results()[1:]
    busy = group.on([3]).call("wait_for", str(tmp_path / "gate"))
    with ThreadPoolExecutor(1) as pool:
        removed = pool.submit(group.remove_workers, 3, cleanup_method="leave", timeout=60)
        eventually(lambda: group.world_size == 1, "they have left the group")
        assert group.call("rank").get_results(timeout=60) == [0], "the others are called meanwhile"
        (tmp_path / "gate").touch()
        assert removed.result(60) == Resized(removed=(1, 2, 3))
    assert busy.get_results() == [3], "its call came to its end"
    assert sorted(path.name for path in tmp_path.glob("left-*")) == ["left-1", "left-2", "left-3"]
    assert not any(map(is_running, gone))
    assert cluster.holders() == {0: (group.name,)}
    assert places(group) == [(0, 1, 2, 0, group.master_port)]
    assert len(look(10.0, [group.name])[0].ranks) == 1
    other = cluster.claim([1, 2], "other")
    assert group.add_workers().added == (1,)
    assert places(group)[1][3] == 3, "the first free one"
    with pytest.raises(BundlesOccupiedError, match="bundle 1: other"):
        group.add_workers()
    other.release()


def test_a_group_whose_new_worker_fails_is_as_it_was(group, cluster, tmp_path):
    (tmp_path / "fails-on-3").touch()
    before = group.call("pid").get_results()
    with pytest.raises(WorkerFailureError, match="there is no rank 3"):
        group.resize(4)
    assert (group.world_size, group.generation, sorted(cluster.holders())) == (2, 0, [0, 1])
    assert group.call("pid").get_results() == before
    assert group.call("get_heard").get_results() == [[(0, 2)]] * 2
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert len(pids) > 2
    assert {pid for pid in pids if is_running(pid)} == set(before), "no new worker is left"
    (tmp_path / "fails-on-3").unlink()
    assert group.resize(4).added == (2, 3)


@pytest.mark.long  # in short, without Ray: test_calls_of_those_that_go_are_waited_for_and_cut
def test_who_is_too_late_is_cut_and_not_taken_for_a_death(cluster, tmp_path):
    told = []
    with RayWorkerGroup(
        cluster, Generator, folder=str(tmp_path), restart_on_failure=True, on_worker_failure=told.append
    ) as group:
        busy = group.on([3]).call("wait_for", str(tmp_path / "gate"))
        eventually(lambda: group.get_worker_status()[3] == "busy", "it is in the call")
        assert group.remove_workers(timeout=0.2) == Resized(removed=(3,), cut=(3,))
        with pytest.raises(WorkerFailureError, match="rank 3"):
            busy.get_results(timeout=60)
        assert (told, group.generation, sorted(cluster.holders())) == ([], 1, [0, 1, 2])
        with pytest.raises(WorkerFailureError, match="died"):
            group.call("die_on", [2]).get_results()
        assert (len(told), group.generation, group.call("rank").get_results()) == (1, 2, [0, 1, 2])


def test_a_dead_rank_may_go_and_none_that_stays_may_be_dead(group):
    with pytest.raises(WorkerFailureError, match="died"):
        group.call("die_on", [1]).get_results()
    eventually(lambda: group.get_worker_status()[1] == "dead", "the dead worker is told")
    with pytest.raises(WorkerGroupError, match=r"ranks \[1\] are dead; restart_failed_workers\(\) first"):
        group.add_workers()
    assert group.remove_workers().removed == (1,)
    assert group.call("rank").get_results() == [0]


@pytest.mark.long  # in short, without Ray: test_calls_of_those_that_go_are_waited_for_and_cut
def test_calls_of_async_workers_end_before_they_do(cluster, tmp_path):
    with RayWorkerGroup(cluster, AsyncGenerator, workers_per_node=2) as group, ThreadPoolExecutor(1) as pool:
        busy = group.on([1]).call("wait_for", str(tmp_path / "gate"))
        eventually(lambda: group.get_worker_status()[1] == "busy", "it is in the call")
        removed = pool.submit(group.remove_workers, timeout=60)
        eventually(lambda: group.world_size == 1, "it has left the group")
        assert group.call("rank").get_results(timeout=60) == [0]
        (tmp_path / "gate").touch()
        assert removed.result(60) == Resized(removed=(1,))
        assert busy.get_results(timeout=60) == [1]


@pytest.mark.long  # in short: test_a_group_whose_new_worker_fails_is_as_it_was
def test_a_shutdown_ends_a_group_that_is_growing(group, cluster, tmp_path):
    (tmp_path / "waits-on-2").touch()
    with ThreadPoolExecutor(1) as pool:
        grown = pool.submit(group.resize, 3)
        eventually(lambda: len(list(tmp_path.glob("pid-*"))) == 3, "the new worker is in its __init__")
        assert group.call("rank").get_results(timeout=60) == [0, 1], "others are called meanwhile"
        assert group.shutdown()
        assert isinstance(grown.exception(60), WorkerGroupClosedError)
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    eventually(lambda: not any(map(is_running, pids)), "no worker is left")
    eventually(lambda: cluster.holders() == {}, "nor a bundle")


@pytest.mark.long  # in short: test_it_grows_and_shrinks_while_it_is_used
@pytest.mark.hostile
def test_a_shutdown_in_the_moment_in_which_they_leave_ends_them_too(group, monkeypatch):
    pids, take, shut = group.call("pid").get_results(), RayWorkerGroup._take_layout, []
    with ThreadPoolExecutor(1) as pool:

        def take_and_shut_down(group, layout):
            take(group, layout)
            has_ended = pool.submit(group.shutdown, force=True).result(120)
            shut.append((has_ended, [pid for pid in pids if is_running(pid)]))

        monkeypatch.setattr(RayWorkerGroup, "_take_layout", take_and_shut_down)
        with suppress(WorkerGroupClosedError):
            group.remove_workers(timeout=600)
    assert shut == [(True, [])]


@pytest.mark.long  # in short: test_it_grows_and_shrinks_while_it_is_used
def test_a_shutdown_does_not_wait_for_calls_of_those_that_leave(group, cluster, tmp_path):
    pids = group.call("pid").get_results()
    busy = group.on([1]).call("wait_for", str(tmp_path / "gate"))
    eventually(lambda: group.get_worker_status()[1] == "busy", "it is in the call")
    with ThreadPoolExecutor(1) as pool:
        removed = pool.submit(group.remove_workers, timeout=600)
        eventually(lambda: group.world_size == 1, "it has left the group")
        assert group.shutdown(force=True)
        with suppress(WorkerGroupClosedError):  # where those that stay were still being told
            assert removed.result(60).cut == (1,)
    with pytest.raises((WorkerFailureError, WorkerGroupClosedError)):
        busy.get_results(timeout=60)
    assert not any(map(is_running, pids))
    assert cluster.holders() == {}


@pytest.mark.long  # in short, without Ray: test_streams_and_balanced_calls_go_to_all_that_there_are
def test_no_item_of_a_stream_is_lost_or_done_twice_while_workers_come_and_go(group, tmp_path):
    over = threading.Event()

    def come_and_go():
        sizes = []
        for size in (4, 1, 3, 2, 4):
            if over.is_set():
                break
            sizes.append(len(group.resize(size, timeout=60).cut))
        return sizes

    with ThreadPoolExecutor(1) as pool:
        changes = pool.submit(come_and_go)
        results = dict(group.balancer.as_completed("note", _until(changes.done, range(100_000))))
        over.set()
        assert not any(changes.result(60))
    assert results == {index: index for index in range(len(results))}
    done = [line for path in tmp_path.glob("noted-*") for line in path.read_text().split()]
    assert sorted(map(int, done)) == sorted(results)


def _until(is_over, items):
    for item in items:
        if is_over():
            return
        yield item


def test_a_group_goes_on_with_fewer_while_the_rest_is_replaced(cluster, tmp_path):
    told = []
    with (
        RayWorkerGroup(
            cluster,
            Generator,
            folder=str(tmp_path),
            restart_on_failure=True,
            min_workers=3,
            on_worker_failure=told.append,
            idempotent_methods=["rank"],
            enable_load_balancing=True,
        ) as group,
        ThreadPoolExecutor(2) as pool,
    ):
        (tmp_path / "holds-2").touch()
        with pytest.raises(WorkerFailureError, match="goes on without rank 2, which is being replaced"):
            group.call("die_on", [2]).get_results(timeout=60)
        assert (group.absent_ranks, len(told)) == ((2,), 1)
        whole = group.call("rank")
        assert (whole.get_results(timeout=60), whole.called_workers) == ([0, 1, 3], [0, 1, 3])
        done = list(group.balancer.map("note", range(12)))
        assert done == list(range(12)), "items go to those that are there"
        assert [load.rank for load in group.balancer.loads()] == [0, 1, 3]
        named = pool.submit(lambda: group.on([2]).call("get_heard").get_results(timeout=60))
        each = pool.submit(lambda: group.run_all_workers_multiple_data("note", [1, 2, 3, 4]).get_results())
        assert group.generation == 0
        (tmp_path / "holds-2").unlink()
        assert named.result(60) == [[(1, 4)]], "who names it waits, and finds it told"
        assert each.result(60) == [1, 2, 3, 4]
        assert (group.absent_ranks, group.generation) == ((), 1)
        assert group.call("get_heard").get_results() == [[(0, 4), (1, 4)]] * 2 + [[(1, 4)], [(0, 4), (1, 4)]]
        with pytest.raises(ValueError, match="there are to be 3 at least"):
            group.resize(2)


@pytest.mark.long  # in short: test_a_group_goes_on_with_fewer_while_the_rest_is_replaced
def test_a_stream_goes_on_when_a_worker_dies_under_it_and_too_few_are_waited_for(cluster, tmp_path):
    with RayWorkerGroup(
        cluster,
        Generator,
        folder=str(tmp_path),
        restart_on_failure=True,
        min_workers=3,
        max_restarts=5,
        idempotent_methods=["note_or_die"],
        enable_load_balancing=True,
    ) as group:
        (tmp_path / "holds-1").touch()
        (tmp_path / "dies-1").touch()
        done = list(group.balancer.map("note_or_die", range(20)))
        assert done == list(range(20)), "its item went to another worker, and no one waited"
        assert group.absent_ranks == (1,)
        with ThreadPoolExecutor(1) as pool:
            failed = pool.submit(lambda: group.call("die_on", [2]).get_results(timeout=60))
            eventually(lambda: group.get_worker_status()[2] == "dead", "it has died")
            (tmp_path / "holds-1").unlink()
            assert isinstance(failed.exception(60), WorkerFailureError)
        assert group.call("rank").get_results(timeout=60) == [0, 1, 2, 3]


@pytest.mark.long  # in short, without devices: test_it_grows_and_shrinks_while_it_is_used
def test_each_rank_has_a_device_of_its_own_whoever_came_and_went(ray_nodes, tmp_path):
    with (
        RayVirtualCluster([3, 3]) as cluster,
        RayWorkerGroup(cluster, Generator, workers_per_node=1, folder=str(tmp_path)) as group,
    ):
        for size in (6, 3, 5):
            group.resize(size)
            assert len({(info.node_id, info.device_index) for info in group.ranks}) == size
            assert group.call("rank").get_results(timeout=60) == list(range(size))
        with pytest.raises(WorkerFailureError):
            group.call("die_on", [2]).get_results(timeout=60)
        eventually(lambda: group.get_worker_status()[2] == "dead", "the dead worker is told")
        before = [(info.bundle_index, info.device_index) for info in group.ranks]
        assert group.restart_failed_workers() == [2]
        assert [(info.bundle_index, info.device_index) for info in group.ranks] == before


@pytest.mark.long  # in short, without Ray: test_a_handle_hears_of_who_joins_and_leaves_though_nobody_has_died
def test_a_handle_follows_and_so_does_a_cluster_that_is_shared(local_ray, tmp_path, monkeypatch):
    monkeypatch.setattr(routes, "_FOLLOW_S", 0.1)
    with RayVirtualCluster([3], use_gpus=False) as cluster:
        copy = pickle.loads(cloudpickle.dumps(cluster))
        with RayWorkerGroup(
            copy, Generator, workers_per_node=1, folder=str(tmp_path), enable_load_balancing=True
        ) as group:
            handle = group.handle()
            group.resize(3)
            eventually(lambda: handle.call("rank").get_results(timeout=60) == [0, 1, 2], "it follows")
            group.resize(1)
            eventually(lambda: handle._open().world_size == 1, "it follows")
            assert list(handle.balancer.map("note", range(5))) == list(range(5))
            assert cluster.holders() == {0: (group.name,)}
        assert cluster.holders() == {}
