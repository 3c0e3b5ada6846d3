"""Weights from GPU to GPU between groups of workers, over each transport that can."""

import os
import signal
import time

import pytest

from device_workers import Generator, Trainer
from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import connected
from raycrew.tensor_transport import WeightDirectory, WeightRoute, sync_weights
from raycrew.worker_groups import RayWorkerGroup

TIMEOUT_S = 120.0


@pytest.mark.gpu
@pytest.mark.hostile
@pytest.mark.parametrize("transport", ["auto", "cuda_ipc", "nccl", "shared_memory", "gloo"])
def test_weights_of_a_device_arrive_roll_back_and_are_caught_up_with(local_ray_session, transport):
    """All are on one device, which is one for each of them to NCCL."""
    how = {"over_nccl": transport == "nccl", "devices": 1}
    with (
        connected(local_ray_session),
        WeightDirectory.start(keep=2) as directory,
        WeightRoute(transport, device="cuda", timeout_s=TIMEOUT_S) as route,
        RayVirtualCluster([1], use_gpus=True, max_colocated_worker_groups=3) as cluster,
        RayWorkerGroup(cluster, Trainer, directory=directory, **how) as trainer,
        RayWorkerGroup(cluster, Generator, directory=directory, **how) as generator,
    ):

        def update(seed):
            trainer.call("learn", seed).get_results(timeout=TIMEOUT_S)
            options = {"prepare": "prepare_weights", "timeout_s": TIMEOUT_S}
            return sync_weights(trainer, [generator], directory=directory, route=route, **options).version

        def holds(seed):
            return all(generator.call("holds", seed).get_results(timeout=TIMEOUT_S))

        assert update(1) == 1 and holds(1)
        assert route.choice.name == ("cuda_ipc" if transport == "auto" else transport)
        assert generator.call("explain").get_results(timeout=TIMEOUT_S) == [route.explain()]
        generator.call("arm").get_results(timeout=TIMEOUT_S)
        with pytest.raises(Exception, match="no room"):
            update(2)
        assert holds(1)
        version = update(3)
        assert holds(3)
        (pid,) = generator.call("pid").get_results(timeout=TIMEOUT_S)
        os.kill(pid, signal.SIGKILL)
        while not generator.restart_failed_workers():
            time.sleep(0.05)
        assert generator.call("catch_up").get_results(timeout=TIMEOUT_S) == [version]
        assert holds(3)
        assert update(4) > version and holds(4)
