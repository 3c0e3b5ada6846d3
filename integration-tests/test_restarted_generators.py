"""Generators that die between updates and within: nobody is served what a new process happens to hold."""

import os
import signal

import pytest
import torch
from weight_workers import Follower

from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import WeightDirectory, WeightPublisher, WeightUpdateError, sync_weights
from raycrew.tensor_transport.testing import LocalPeers
from raycrew.worker_groups import RayWorkerGroup, WorkerFailureError

TIMEOUT_S = 120.0


class Trainer:
    """Publishes all it has, and then what changed."""

    def __init__(self, directory):
        self.publisher = WeightPublisher(directory=directory)
        self.weights = {"scale": torch.ones(3), "bias": torch.ones(2)}

    def publish_weights(self):
        published = self.publisher.publish(self.weights, partial="bias" not in self.weights)
        self.weights = {"scale": torch.full((3,), 2.0)}
        return published


@pytest.mark.long  # in short: test_weight_updates, and without Ray tensor-transport's test_stale_weights
@pytest.mark.slow
@pytest.mark.hostile
@pytest.mark.parametrize("follows", [False, True])
def test_generators_that_were_restarted_serve_nothing_until_they_are_synchronised(local_ray, follows):
    with (
        WeightDirectory.start() as directory,
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            Follower,
            directory=directory,
            follows=follows,
            restart_on_failure=True,
            idempotent_methods=["generate"],
        ) as generators,
    ):
        trainer = LocalPeers([Trainer(directory)])

        def sync():
            found = sync_weights(
                trainer, generators, directory=directory, prepare="prepare_weights", timeout_s=TIMEOUT_S
            )
            return found.version

        def generate(version):
            return generators.call("generate", version).get_results(timeout=TIMEOUT_S)

        def holders():
            return [status.holders for status in directory.status() if status.version == directory.latest]

        assert sync() == 1 and generate(1) == [(1, [1.0] * 5)] * 2
        os.kill(generators.call("pid").get_results(timeout=TIMEOUT_S)[1], signal.SIGKILL)
        if follows:
            assert generate(1) == [(1, [1.0] * 5)] * 2
        else:
            with pytest.raises(Exception, match=r"holds no version yet.*pull\(\)"):
                generate(1)
            assert holders() == [("generator 0",)]
        assert generators.generation == 1
        assert sync() == 2, "a partial version, which a new process adds to the one before"
        assert generate(2) == [(2, [2.0] * 3 + [1.0] * 2)] * 2
        assert holders() == [("generator 0", "generator 1")]


@pytest.mark.hostile
@pytest.mark.parametrize("idempotent", [(), ("apply_weights",)])
def test_who_survives_an_update_hears_of_the_dead_before_they_are_replaced(local_ray, idempotent):
    with (
        WeightDirectory.start() as directory,
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            Follower,
            directory=directory,
            follows=False,
            restart_on_failure=True,
            idempotent_methods=idempotent,
        ) as generators,
    ):
        trainer = LocalPeers([Trainer(directory)])
        generators.on(ranks=[1]).call("arm").get_results(timeout=TIMEOUT_S)
        with pytest.raises((WorkerFailureError, WeightUpdateError)) as failed:
            sync_weights(trainer, generators, directory=directory, timeout_s=TIMEOUT_S)
        told = repr(failed.value) + " ".join(failed.value.__notes__)
        assert "UpdateAborted" in told and "failed on rank 1" in told, "not that they were late"
        assert generators.generation == 1
        trainer = LocalPeers([Trainer(directory)])  # publishes all once more: nobody has the first version
        assert sync_weights(trainer, generators, directory=directory, timeout_s=TIMEOUT_S).version == 2
