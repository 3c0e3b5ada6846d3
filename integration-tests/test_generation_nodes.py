"""Replicas on several nodes: one dies in an update, and after it all are of the same version."""

import pytest

pytest.importorskip("transformers")

from generation_echo import MODEL, EchoTrainer
from generation_stage import PROMPTS, GroupStage, batch_of, rows_of

from generation import EngineOptions, start_generators
from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import WeightDirectory, WeightUpdateError
from raycrew.worker_groups import WorkerFailureError


@pytest.mark.long  # in short, on one node: test_generation_group
def test_replicas_on_several_nodes_are_of_one_version_though_one_dies_in_the_update(ray_nodes, tmp_path):
    with (
        WeightDirectory.start() as directory,
        RayVirtualCluster([3], use_gpus=False, placement_group_strategy="STRICT_SPREAD") as cluster,
        start_generators(
            cluster,
            "generation_echo.FallingWorker",
            EngineOptions(MODEL, more={"folder": str(tmp_path)}),
            worker_options={"directory": directory},
        ) as generators,
    ):
        assert len({bundle.node_id for bundle in cluster.bundles}) == 3
        stage = GroupStage(generators, directory, EchoTrainer(directory))
        assert stage.sync() == 1
        pids = generators.call("pid")
        (tmp_path / "2").touch()
        future = generators.begin(batch_of(PROMPTS * 3), {"max_tokens": 300})
        stage.wait_for(lambda found: found.running)
        with pytest.raises((WeightUpdateError, WorkerFailureError)):
            stage.sync()
        assert not list(tmp_path.iterdir()), "it has died in the update"
        rows = [row for part in future.get_results(timeout=120) for row in rows_of(part)]
        assert sorted(row[0] for row in rows) == list(range(len(PROMPTS) * 3)), "each is there once"
        assert all(chosen == float(by) for row in rows for chosen, by in zip(row[3], row[4], strict=True))
        version = stage.sync()
        assert {found.weight_version for found in generators.metrics()} == {version}
        after = generators.call("pid")
        assert [now != then for now, then in zip(after, pids, strict=True)] == [False, True, False]
        served = {by for row in rows_of(generators.generate(batch_of(PROMPTS * 3))) for by in row[4]}
        assert served == {version}
