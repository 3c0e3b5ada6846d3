"""Generators that come and go between updates: who comes has the latest weights, who goes holds none."""

import torch
from weight_workers import Follower

from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import WeightDirectory, WeightPublisher, sync_weights
from raycrew.tensor_transport.testing import LocalPeers
from raycrew.worker_groups import RayWorkerGroup

TIMEOUT_S = 120.0


class Trainer:
    def __init__(self, directory):
        self.publisher = WeightPublisher(directory=directory)
        self.value = 0.0

    def publish_weights(self):
        self.value += 1
        return self.publisher.publish(
            {"scale": torch.full((3,), self.value), "bias": torch.full((2,), self.value)}
        )


def test_a_generator_that_joins_has_the_latest_weights_and_one_that_left_holds_none(local_ray):
    with (
        WeightDirectory.start() as directory,
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Follower, workers_per_node=1, directory=directory, follows=True
        ) as generators,
    ):
        trainer = LocalPeers([Trainer(directory)])

        def sync():
            named = {"prepare": "prepare_weights", "timeout_s": TIMEOUT_S}
            return sync_weights(trainer, generators, directory=directory, **named).version

        def generate(version):
            return generators.call("generate", version).get_results(timeout=TIMEOUT_S)

        def holders():
            return [status.holders for status in directory.status() if status.version == directory.latest]

        assert sync() == 1
        assert generators.add_workers().added == (1,)
        assert generate(1) == [(1, [1.0] * 5)] * 2, "it has pulled them itself"
        assert holders() == [("generator 0", "generator 1")]
        assert sync() == 2, "and is updated with the others"
        assert generate(2) == [(2, [2.0] * 5)] * 2
        assert generators.remove_workers(cleanup_method="leave", timeout=TIMEOUT_S).cut == ()
        assert holders() == [("generator 0",)]
        assert (sync(), generate(3)) == (3, [(3, [3.0] * 5)])
        assert holders() == [("generator 0",)]
