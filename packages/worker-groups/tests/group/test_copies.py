"""Groups that travel to other processes."""

import pytest
import ray
from ray import cloudpickle
from workers import Worker

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import RayWorkerBuilder, RayWorkerGroup, WorkerGroupClosedError, WorkerGroupError
from raycrew.worker_groups.testing import InProcessGroup

pytestmark = pytest.mark.hostile


def refusal(call):
    try:
        call()
    except WorkerGroupError as error:
        return str(error)
    return "done"


def use(group):
    """What code in a task sees of a group that it was given."""
    return {
        "added": group.call("add", 1).get_results(timeout=60),
        "environment": group.call("environment", "API_TOKEN").get_results(timeout=60),
        "balanced": next(group.balancer.map("echo", ["x"]))[1],
        "places": (group.placements, group.ranks, group.worker_metadata, repr(group)),
        "status": group.get_worker_status(timeout=60),
        "restart": refusal(group.restart_failed_workers),
        "shutdown": refusal(group.shutdown),
    }


def test_a_copy_calls_and_has_no_secrets(local_ray, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "a-very-secret-token")
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            RayWorkerBuilder(Worker, "an-argument-of-init"),
            secrets=["API_TOKEN"],
            env_vars={"COLOUR": "a-colour"},
            enable_load_balancing=True,
            scale=2,
        ) as group,
    ):
        pickled = cloudpickle.dumps(group)
        for hidden in (b"a-very-secret-token", b"an-argument-of-init", b"a-colour"):
            assert hidden not in pickled
        group.shutdown(force=True)
        copy = cloudpickle.loads(cloudpickle.dumps(group))
        with pytest.raises(WorkerGroupClosedError, match="was shut down"):
            copy.call("add", 1)


def test_what_a_copy_can_do_and_what_only_the_owner(local_ray, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "a-very-secret-token")
    with (
        RayVirtualCluster([3], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Worker, [2], secrets=["API_TOKEN"], base=10, enable_load_balancing=True
        ) as group,
    ):
        seen = ray.get(ray.remote(num_cpus=0)(use).remote(group), timeout=200)
        assert seen["added"] == [11, 11]
        assert seen["environment"] == [{"API_TOKEN": "a-very-secret-token"}] * 2
        assert seen["balanced"] == ("x",)
        assert seen["places"] == (group.placements, group.ranks, group.worker_metadata, repr(group))
        assert seen["status"] == {0: "ready", 1: "ready"}
        assert "restart_failed_workers() of worker group 'Worker' is for the process" in seen["restart"]
        assert "shutdown() of worker group 'Worker' is for the process" in seen["shutdown"]
        assert group.call("add", 1).get_results() == [11, 11]
        assert group.restart_failed_workers() == []


def test_a_group_in_process_stays_there():
    with InProcessGroup(FakeCluster([1]), Worker) as group, pytest.raises(TypeError, match="this process"):
        cloudpickle.dumps(group)
