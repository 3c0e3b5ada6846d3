import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import ray
from patience import eventually, is_running, read_pids
from workers import SlowAgain, Worker

from raycrew.cluster_core import RayVirtualCluster
from raycrew.worker_groups import RayWorkerGroup, WorkerFailureError, WorkerGroupClosedError


class Environments:
    """A provider that counts how often the nodes are asked to have a class's environment."""

    def __init__(self):
        self.asked = []

    def python_for(self, fqn, runner):
        self.asked.append((fqn, runner))


@pytest.mark.hostile
def test_a_dead_worker_is_told_and_replaced(local_ray, tmp_path):
    environments = Environments()
    with (
        RayVirtualCluster([3], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Worker, base=10, env_vars={"COLOUR": "red"}, environments=environments
        ) as group,
    ):
        assert environments.asked == [("workers.Worker", cluster)]
        group.call("keep", "mine").get_results()
        before, ports = group.call("pid").get_results(), group.master_port
        gate = tmp_path / "gate"
        busy = group.on(ranks=[2]).call("wait_for", str(gate))
        with pytest.raises(WorkerFailureError, match="died during die_on"):
            group.on(ranks=[0, 1]).call("die_on", [0]).get_results()
        eventually(
            lambda: group.get_worker_status() == {0: "dead", 1: "ready", 2: "busy"}, "the dead worker is told"
        )
        assert group.restart_failed_workers() == [0]
        assert group.restart_failed_workers() == []
        assert environments.asked == [("workers.Worker", cluster)] * 2
        gate.touch()
        busy.get_results()
        assert set(group.get_worker_status(timeout=60).values()) == {"ready"}
        after = group.call("pid").get_results()
        assert (after[0] != before[0], after[1:]) == (True, before[1:])
        assert group.call("get_kept").get_results() == [None, "mine", "mine"]
        assert group.call("add", 1).get_results() == [11] * 3
        assert group.master_port != ports
        assert group.generation == 1
        assert [(w.rank, w.generation, w.bundle_index) for w in group.call("where").get_results()] == [
            (0, 1, 0),
            (1, 1, 1),
            (2, 1, 2),
        ]
        seen = group.call("environment", "MASTER_PORT", "RANK", "COLOUR").get_results()
        port = str(group.master_port)
        assert seen == [{"MASTER_PORT": port, "RANK": str(rank), "COLOUR": "red"} for rank in range(3)]
        assert os.environ.get("RANK") is None
        assert ray.get(group.workers[0].add.remote(1)) == 11


@pytest.mark.hostile
def test_two_threads_that_restart_have_one_restart(local_ray):
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, init_timeout_s=60) as group,
        ThreadPoolExecutor(2) as threads,
    ):
        with pytest.raises(WorkerFailureError, match="died"):
            group.call("die_on", [1]).get_results()
        eventually(lambda: group.get_worker_status()[1] == "dead", "the dead worker is told")
        together = Barrier(2)

        def restart(_):
            together.wait(60)
            return group.restart_failed_workers()

        assert [1] in (outcomes := list(threads.map(restart, range(2))))
        assert outcomes in ([[1], [1]], [[1], []], [[], [1]])  # who came too late found nobody dead
        assert group.generation == 1
        assert group.call("add", 1).get_results() == [1, 1]


@pytest.mark.hostile
def test_a_shutdown_ends_a_restart(local_ray, tmp_path):
    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        ThreadPoolExecutor(1) as threads,
        RayWorkerGroup(cluster, SlowAgain, folder=str(tmp_path)) as group,
    ):
        with pytest.raises(WorkerFailureError, match="died"):
            group.call("die").get_results()
        eventually(lambda: group.get_worker_status()[0] == "dead", "the dead worker is told")
        restart = threads.submit(group.restart_failed_workers)
        eventually(lambda: len(read_pids(tmp_path)) == 2, "the new worker is in its __init__")
        group.shutdown(force=True)
        assert isinstance(restart.exception(60), WorkerGroupClosedError)
        eventually(lambda: not any(map(is_running, read_pids(tmp_path))), "no worker is left")
