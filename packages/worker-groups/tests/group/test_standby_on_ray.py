"""Workers that stand by, and spare bundles; test_choosing has what needs no processes."""

import os
import pickle
import signal

import pytest
import ray
from patience import eventually, is_running
from ray import cloudpickle
from replaced_workers import Replaced

from raycrew.cluster_core import NodeLostError, RayVirtualCluster
from raycrew.cluster_core.testing import connected, simulated_nodes
from raycrew.worker_groups import RayWorkerGroup, Spare, WorkerFailureError, WorkerGroupError
from raycrew.worker_groups._health import look, take_stacks
from raycrew.worker_groups._health.diagnosis import diagnose_groups

pytestmark = pytest.mark.hostile

PRELOAD = ["standing_by"]


@pytest.fixture
def cluster(local_ray):
    with RayVirtualCluster([4], use_gpus=False) as made:
        yield made


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("TOKEN", "hidden")


def lose(group, ranks):
    with pytest.raises(WorkerFailureError, match="died"):
        group.on(ranks=ranks).call("die_on", ranks).get_results()
    eventually(
        lambda: all(group.get_worker_status()[rank] == "dead" for rank in ranks), "the dead workers are told"
    )


def standbys(group):
    return [spare.pid for spare in group.spares if spare.pid is not None]


def await_standby(group):
    eventually(lambda: standbys(group), "somebody stands by")
    return standbys(group)[0]


def pids(group):
    return group.call("pid").get_results(timeout=60)


def test_who_stands_by_takes_over_and_somebody_else_stands_by_then(cluster, caplog, tmp_path):
    options = {"secrets": ["TOKEN"], "env_vars": {"COLOUR": "red"}, "init": {"start": 10}}
    with RayWorkerGroup(cluster, Replaced, standby=1, preload=PRELOAD, **options) as group:
        before, names, port, handle = pids(group), names_of(group), group.master_port, group.handle()
        assert (group.world_size, sorted(cluster.holders())) == (3, [0, 1, 2, 3])
        (spare,) = group.spares
        assert (spare.bundle_index, spare.node_id) == (3, group.ranks[0].node_id)
        assert is_running(spare.pid)
        (shown,) = look(10.0, [group.name])
        assert [(one.worker.pid, one.state) for one in shown.standbys] == [(spare.pid, "ready")]
        group.call("add", 1).get_results()

        lose(group, [1])
        assert group.restart_failed_workers() == [1]
        assert handle.refresh() == 1
        assert pids(group) == handle.call("pid").get_results() == [before[0], spare.pid, before[2]]
        assert group.call("add", 1).get_results() == [12, 11, 12]
        assert [(w.rank, w.bundle_index, w.generation) for w in group.call("where").get_results()] == [
            (0, 0, 1),
            (1, 3, 1),
            (2, 2, 1),
        ]
        assert [placed.bundle_index for placed in group.placements] == [0, 3, 2]
        assert names_of(group) == names
        new = group.master_port
        old = [(0, port, port), (1, new, new)]
        assert group.call("get_heard").get_results() == [old, old[1:], old]
        alone = group.on([1])
        (found,) = alone.call("found_before").get_results()
        assert (found["RANK"], found["TOKEN"], found["COLOUR"]) == (None, None, None)
        told = {"RANK": "1", "TOKEN": "hidden", "COLOUR": "red"}
        assert alone.call("at_import").get_results() == [told]
        assert alone.call("now", *told).get_results() == [told]
        assert "becomes rank 1" in caplog.text

        killed = await_standby(group)
        assert group.spares == [Spare(1, spare.node_id, spare.node_address, killed)]
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: group.get_standby_status() == {1: "dead"}, "it is found dead")
        assert killed not in standbys(group)
        killed = await_standby(group)
        eventually(lambda: group.get_standby_status() == {1: "ready"}, "somebody else stands by")
        for told in (group.diagnose(tmp_path), *diagnose_groups(60.0, [group.name], tmp_path)):
            assert [(one.rank, one.pid, one.state) for one in told.standbys] == [(-1, killed, "ready")]
            assert [one.pid for one in told.ranks] == pids(group)
            assert "== standby: ready" in (told.folder / "diagnosis.txt").read_text()
        copy = pickle.loads(cloudpickle.dumps(group))
        assert copy.diagnose(tmp_path).standbys == ()
        with pytest.raises(WorkerGroupError, match=r"get_standby_status\(\) of .* the process that made it"):
            copy.get_standby_status()
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: not is_running(killed), "nobody stands by")
        lose(group, [0])
        assert group.restart_failed_workers() == [0]
        assert f"process {killed}, which stood by on bundle 1 has died" in caplog.text
        assert (pids(group)[1:], group.ranks[0].bundle_index) == ([spare.pid, before[2]], 0)
        everybody = [await_standby(group), *pids(group)]
    assert not any(map(is_running, everybody))
    assert cluster.holders() == {}


def test_two_who_stand_by_take_over_from_two_that_are_lost_at_once_and_are_seen_before(cluster):
    with RayWorkerGroup(cluster, Replaced, standby=2, preload=PRELOAD) as group:
        waiting = standbys(group)
        assert len(set(waiting)) == 2
        (shown,) = look(10.0, [group.name])
        seats = [(one.placement_group, one.placement_bundle) for one in shown.record.processes]
        assert len(set(seats)) == 4 and all(placement_group for placement_group, _ in seats)
        seen = [(one.worker.rank, one.worker.pid, bool(one.text)) for one in take_stacks(10.0, [group.name])]
        assert seen[2:] == [(-1, pid, True) for pid in waiting] and len(seen) == 4
        lose(group, [0, 1])
        assert group.restart_failed_workers() == [0, 1]
        assert sorted(pids(group)) == sorted(waiting)
        assert {info.bundle_index for info in group.ranks} == {2, 3}
    assert cluster.holders() == {}


def names_of(group):
    return [told["name"] for told in group.worker_metadata]


def test_a_module_that_can_not_be_imported_is_named_and_nothing_is_left(cluster):
    with pytest.raises(WorkerFailureError, match="'no_such_module' of preload= can't be imported") as raised:
        RayWorkerGroup(cluster, Replaced, workers_per_node=1, standby=1, preload=["json", "no_such_module"])
    assert raised.value.method == "preload"
    assert cluster.holders() == {}
    assert "Replaced" not in {group.record.name for group in look(10.0)}


@pytest.mark.parametrize(
    ("fate", "said"),
    [
        (signal.SIGKILL, "died"),
        # In short, without processes: test_who_is_stopped_while_it_takes_over_is_lost_and_nobody_else_is.
        pytest.param(signal.SIGSTOP, "is stopped", marks=pytest.mark.long),
    ],
)
def test_who_is_lost_while_it_takes_over_costs_no_restart(cluster, tmp_path, caplog, fate, said):
    path = tmp_path / "fate"
    options = {"restart_on_failure": True, "max_restarts": 1, "idempotent_methods": ["pid"]}
    with RayWorkerGroup(
        cluster, Replaced, workers_per_node=1, standby=1, init={"fate": path}, **options
    ) as group:
        (spare,) = group.spares
        path.write_text(str(int(fate)))
        os.kill(pids(group)[0], signal.SIGKILL)
        (pid,) = pids(group)
        assert (path.exists(), is_running(spare.pid), pid == spare.pid) == (False, False, False)
        assert f"process {spare.pid}, which stood by, {said}" in caplog.text
        assert (group.ranks[0].bundle_index, group.generation) == (0, 1)
        assert await_standby(group) not in (pid, spare.pid)
    assert cluster.holders() == {}


@pytest.mark.parametrize("n", [3, pytest.param(1, marks=pytest.mark.long)])
def test_who_is_found_dead_while_a_group_is_resized_is_replaced_afterwards(cluster, monkeypatch, n):
    with RayWorkerGroup(cluster, Replaced, workers_per_node=2, standby=1) as group:
        (killed,), publish = standbys(group), group._crew.directory.publish

        def look(members):  # in the midst of it
            monkeypatch.undo()
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: group.get_standby_status() == {2: "dead"}, "it is found dead")
            assert standbys(group) == []
            publish(members)

        monkeypatch.setattr(group._crew.directory, "publish", look)
        group.resize(n)
        assert await_standby(group) != killed
        assert len(pids(group)) == n
    assert cluster.holders() == {}


@pytest.mark.long  # in short: test_who_stands_by_takes_over_and_somebody_else_stands_by_then
def test_while_nobody_stands_by_yet_ranks_are_started_as_ever_and_a_shutdown_ends_all(cluster, tmp_path):
    options = {"standby": 1, "preload": PRELOAD, "env_vars": {"PYTHON_GATE": str(tmp_path)}}
    with RayWorkerGroup(cluster, Replaced, workers_per_node=2, **options) as group:
        first = await_standby(group)
        os.kill(first, signal.SIGSTOP)
        lose(group, [0])
        (tmp_path / "closed").touch()
        assert group.restart_failed_workers() == [0]
        assert not is_running(first), "who does not answer is ended"
        assert first not in pids(group)
        eventually(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "somebody is being prepared")
        lose(group, [1])
        assert group.restart_failed_workers() == [1]
        assert [info.bundle_index for info in group.ranks] == [0, 1]
        assert (standbys(group), sorted(cluster.holders())) == ([], [0, 1, 2])
        assert group.resize(3).added == (2,)
        assert [info.bundle_index for info in group.ranks] == [0, 1, 3], "not on a spare one"
        prepared = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
        everybody = [*pids(group), *prepared]
    assert not any(map(is_running, everybody))
    assert cluster.holders() == {}


@pytest.mark.long  # in short, without Ray: test_who_has_lost_a_bundle_takes_any_and_others_only_where_...
def test_ranks_of_a_lost_node_move_to_spare_bundles():
    with simulated_nodes([{"num_cpus": 4}] * 2) as nodes, connected(nodes.address):
        head = ray.get_runtime_context().get_node_id()
        with (
            RayVirtualCluster([4, 4], use_gpus=False, node_order={head: 0}) as cluster,
            RayWorkerGroup(cluster, Replaced, bundle_indices_list=[[1], [4]], spare_bundles=1) as bare,
            RayWorkerGroup(
                cluster, Replaced, bundle_indices_list=[[3], [5]], standby=1, preload=PRELOAD
            ) as warm,
            RayWorkerGroup(cluster, Replaced, bundle_indices_list=[[6], [7]]) as plain,
        ):
            assert bare.spares == [Spare(0, head, bare.ranks[0].node_address)]
            (spare,) = warm.spares
            assert (spare.bundle_index, spare.node_id) == (2, head)
            (node,) = [one for one in nodes.list_all_nodes() if one.node_id != head]
            nodes.remove_node(node, allow_graceful=False)
            for group in (bare, warm, plain):
                eventually(lambda each=group: each.get_worker_status()[1] == "dead", "its worker is dead")
            said = r"lost the bundles of ranks \[0, 1\].*no spare bundle .* would do \(it has 0\)"
            with pytest.raises(NodeLostError, match=said):
                plain.restart_failed_workers()
            assert bare.restart_failed_workers() == warm.restart_failed_workers() == [1]
            assert pids(warm)[1] == spare.pid
            for group, bundles in ((bare, [1, 0]), (warm, [3, 2])):
                told = [(w.bundle_index, w.node_id, w.local_rank) for w in group.call("where").get_results()]
                assert told == [(bundles[0], head, 0), (bundles[1], head, 1)]
                assert group.spares == []
            assert sorted(cluster.holders()) == [0, 1, 2, 3, 6, 7]
        assert plain.unended.keys() == {0, 1}


@pytest.mark.long  # in short, on CPUs: test_who_stands_by_takes_over_and_somebody_else_stands_by_then
def test_who_stands_by_has_the_device_of_its_own_bundle_from_the_start(ray_nodes):
    with (
        RayVirtualCluster([3]) as cluster,
        RayWorkerGroup(cluster, Replaced, standby=1, preload=PRELOAD) as group,
    ):
        devices = {bundle.index: bundle.device_index for bundle in cluster.bundles}
        (spare,) = group.spares
        lose(group, [0])
        assert group.restart_failed_workers() == [0]
        worker = group.call("where").get_results()[0]
        assert (worker.bundle_index, worker.device_index) == (spare.bundle_index, devices[spare.bundle_index])
        mask = {"CUDA_VISIBLE_DEVICES": str(devices[spare.bundle_index])}
        assert group.call("found_before").get_results()[0].items() >= mask.items()
        assert group.call("now", *mask).get_results()[0] == mask
        with pytest.raises(WorkerGroupError, match=r"spares\(\) of .* is for the process that made it"):
            _ = pickle.loads(cloudpickle.dumps(group)).spares
