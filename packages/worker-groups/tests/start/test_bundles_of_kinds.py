"""Groups on a cluster whose bundles are not alike."""

import pytest
import ray

from raycrew.cluster_core import BundleSpec, RayVirtualCluster
from raycrew.worker_groups import RayWorkerGroup, current_worker

MIXED = {
    "use_gpus": False,
    "bundle_specs": [BundleSpec(cpus=2), BundleSpec(cpus=0.5)],
    "max_colocated_worker_groups": 2,
}


class Asker:
    def granted(self):
        """This worker's rank, bundle, and what Ray has given it."""
        worker = current_worker()
        assigned = ray.get_runtime_context().get_assigned_resources()
        return worker.rank, worker.bundle_index, assigned["CPU"]


def granted(group):
    return group.call("granted").get_results(timeout=60)


def test_groups_get_what_their_bundles_hold(local_ray):
    with (
        RayVirtualCluster([1, 2], **MIXED) as cluster,
        RayWorkerGroup(cluster, Asker, name_prefix="trainer", workers_per_node=[1, 0]) as trainers,
        RayWorkerGroup(cluster, Asker, name_prefix="sandbox", workers_per_node=[0, 2]) as sandboxes,
        RayWorkerGroup(cluster, Asker, name_prefix="all") as everywhere,
    ):
        assert granted(trainers) == [(0, 0, 1.0)]
        assert granted(sandboxes) == [(0, 1, 0.25), (1, 2, 0.25)]
        assert granted(everywhere) == [(0, 0, 1.0), (1, 1, 0.25), (2, 2, 0.25)]
        assert [place.share for place in everywhere.placements] == [0.5] * 3
        names = [place["name"] for place in sandboxes.worker_metadata]
        assert names == ["sandbox-1-0", "sandbox-1-1"]


@pytest.mark.long
def test_a_tied_group_gets_what_its_bundles_hold(local_ray):
    with (
        RayVirtualCluster([1, 2], **MIXED) as cluster,
        RayWorkerGroup(cluster, Asker, bundle_indices_list=[[2, 0]]) as tied,
    ):
        assert granted(tied) == [(0, 2, 0.25), (1, 0, 1.0)]
        assert tied.tied_workers_groups == [[0, 1]]
