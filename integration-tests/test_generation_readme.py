"""What the README of the generation library says of routes is so; its other blocks run elsewhere."""

import pytest

pytest.importorskip("transformers")

from generation_echo import MODEL as ECHO
from generation_echo import EchoTrainer
from generation_readme import block_with

from generation import EngineOptions, start_generators
from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import connected
from raycrew.tensor_transport import RouteStore, WeightDirectory, WeightRoute, sync_weights
from raycrew.tensor_transport.testing import LocalPeers


def test_the_block_on_routes_runs(local_ray_session, capsys):
    def start(cluster, worker, options, **how):
        return start_generators(cluster, "generation_echo.EchoWorker", options, **how)

    with (
        connected(local_ray_session),
        WeightDirectory.start() as directory,
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RouteStore() as store,
    ):
        trainer = EchoTrainer(directory, store)
        given = {"WeightRoute": WeightRoute, "RouteStore": RouteStore, "sync_weights": sync_weights}
        given |= {"start_generators": start, "cluster": cluster, "options": EngineOptions(ECHO)}
        exec(block_with("WeightRoute"), given | {"directory": directory, "trainer": LocalPeers([trainer])})
        trainer.publisher.close()
    assert "shared_memory" in capsys.readouterr().out
