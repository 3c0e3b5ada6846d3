"""What a worker class is told before it is described."""

import inspect

import pytest
from workers import Configured

from raycrew.cluster_core import BundleSpec
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import RayWorkerBuilder, RayWorkerGroup
from raycrew.worker_groups._start.describing import describe_worker
from raycrew.worker_groups._start.spec.options import GroupOptions
from raycrew.worker_groups._start.spec.spec import GroupSpec
from raycrew.worker_groups._worker import source_of
from raycrew.worker_groups.sharding._ranks import plan_seats

_PARAMETERS = inspect.signature(RayWorkerGroup).parameters.values()
DEFAULTS = GroupOptions(**{p.name: p.default for p in _PARAMETERS if p.kind is p.KEYWORD_ONLY})


def told(cluster, **layout):
    """What `configure_worker` of each worker is told, but for the share of the GPUs."""
    plan = plan_seats(cluster.bundles, **layout)
    spec = GroupSpec("g", RayWorkerBuilder(Configured), cluster, plan, DEFAULTS)
    claim = cluster.claim(plan.indices, "g")
    positions = range(len(claim.bundles))
    info = describe_worker(spec, claim, source_of(Configured), None, None, tuple, positions)
    return [one.init_kwargs["told"] for one in info.configured]


@pytest.mark.parametrize(
    ("gpus", "per_node"),
    [([1, 1, 0], 2), ([4], 4), ([1, 2], 3), ([0, 0], 0), ([0.5, 0.5], 1), ([0.5], 1), ([0.1] * 3, 1)],
)
def test_the_devices_of_a_node_are_those_of_its_bundles(gpus, per_node):
    specs = [[BundleSpec(gpus=n) for n in gpus], BundleSpec(gpus=1)]
    cluster = FakeCluster([len(gpus), 1], bundle_specs=specs)
    *here, there = told(cluster)
    assert [(share, devices) for share, _, devices in here] == [(n, per_node) for n in gpus]
    assert there == (1, (1, [0]), 1)


@pytest.mark.parametrize("slots", [1, 3])
def test_where_bundles_are_alike_each_is_a_device(slots):
    cluster = FakeCluster([2, 0, 4], use_gpus=True, max_colocated_worker_groups=slots)
    assert [devices for _, _, devices in told(cluster)] == [2, 2, 4, 4, 4, 4]
    if slots > 1:
        assert [devices for _, _, devices in told(cluster, workers_per_node=[1, 3])] == [1, 3, 3, 3]
    assert {devices for _, _, devices in told(FakeCluster([3]))} == {0}
