"""Bundles of different kinds, and nodes in an order of the caller's, granted by Ray as they were planned."""

import random
import threading

import pytest
import ray
from ray.util.placement_group import placement_group_table

from raycrew.cluster_core import (
    AllocationTimeoutError,
    BundleSpec,
    InfeasibleRequestError,
    RayVirtualCluster,
    ResourceInsufficientError,
    node_states,
)


@ray.remote
class Where:
    def here(self):
        context = ray.get_runtime_context()
        return context.get_node_id(), sorted(context.get_accelerator_ids()["GPU"])


@ray.remote(num_cpus=0)
def seen_in_a_copy(cluster):
    claim = cluster.claim([4], "a copy")
    return cluster.world_size(), [dict(one.resources) for one in claim.bundles]


def reversed_ranks():
    return {node.node_id: -rank for rank, node in enumerate(node_states())}


def nodes_of(cluster):
    return list(dict.fromkeys(bundle.node_id for bundle in cluster.bundles))


@pytest.mark.parametrize("unified", [False, pytest.param(True, marks=pytest.mark.long)])
def test_bundles_of_different_kinds_are_granted_claimed_and_shared(ray_nodes, unified):
    trainer = BundleSpec(cpus=0.5, gpus=1)
    pair, sandbox = BundleSpec(cpus=1, gpus=2), BundleSpec(cpus=3, memory=64 << 20)
    specs = [[sandbox, trainer, trainer], [pair, sandbox]]
    lock = threading.Lock()  # What a function holds need not be picklable.
    order = reversed_ranks()

    def key(node):
        with lock:
            return order[node.node_id]

    options = {"bundle_specs": specs, "unified": unified, "node_order": key}
    planned = RayVirtualCluster.plan([3, 2], **options)
    with RayVirtualCluster([3, 2], **options) as cluster:
        assert tuple(b.node_id for b in cluster.bundles) == planned.node_ids[0] + planned.node_ids[1]
        assert nodes_of(cluster) == [node.node_id for node in reversed(node_states())][:1]
        assert cluster.rendezvous().node_id == cluster.bundles[0].node_id
        held = [dict(one.resources) for one in cluster.bundles]
        assert held == [one.amounts("GPU") for node in specs for one in node]
        claim = cluster.claim([2, 3], "trainers")
        first, second = cluster.claim([0], "sandbox"), cluster.claim([1], "more")
        actors = [Where.options(**claim.actor_options(i)).remote() for i in range(2)]
        actors += [Where.options(**one.actor_options(0)).remote() for one in (first, second)]
        found = ray.get([actor.here.remote() for actor in actors], timeout=120)
        assert [node for node, _ in found] == [cluster.bundles[i].node_id for i in (2, 3, 0, 1)]
        assert [len(devices) for _, devices in found] == [1, 2, 0, 1]
        devices = [one.device_index for one in cluster.bundles]
        assert devices[0] is None and devices[1] < devices[2], "kinds keep their positions"
        assert [int(found[3][1][0]), int(found[0][1][0])] == devices[1:3]
        assert ray.get(seen_in_a_copy.remote(cluster), timeout=120) == (5, [held[4]])


@pytest.mark.hostile
def test_an_order_is_kept_when_a_cluster_is_made_anew_and_when_nodes_fill_up(ray_nodes):
    ids = [node.node_id for node in node_states()]
    order = {ids[2]: 0, ids[0]: 1, "gone": 0.5}
    for _ in range(2):
        with RayVirtualCluster([4, 4], node_order=order) as cluster:
            assert nodes_of(cluster) == [ids[2], ids[0]]
    with (
        RayVirtualCluster([3], node_order=order) as first,
        RayVirtualCluster([3], node_order=order) as second,
    ):
        assert nodes_of(first) + nodes_of(second) == [ids[2], ids[0]]
        with RayVirtualCluster([1, 4], node_order=order) as third:
            assert nodes_of(third) == [ids[2], ids[1]], "a node without a rank comes last"
    with pytest.raises(ValueError, match="none is a node of this cluster"):
        RayVirtualCluster([1], node_order={"10.0.0.1": 0})
    with pytest.raises(ValueError, match="raised ZeroDivisionError"):
        RayVirtualCluster([1], node_order=lambda node: 1 / 0)
    assert not [one for one in placement_group_table().values() if one["state"] != "REMOVED"]


@pytest.mark.hostile
def test_what_differs_is_explained_kind_by_kind(ray_nodes):
    specs = [BundleSpec(cpus=1, gpus=4), BundleSpec(cpus=1, resources={"disk": 2})]
    with pytest.raises(InfeasibleRequestError) as error:
        RayVirtualCluster([1, 1], bundle_specs=specs)
    assert "1 x [1 x (1 CPU, 4 GPU)] + 1 x [1 x (1 CPU, 2 disk)]" in error.value.reasons[0]
    assert "on empty nodes for 3 / 0" in error.value.reasons[0]
    mixed = [[BundleSpec(cpus=2, gpus=1), BundleSpec(cpus=1)]]
    apart = {"use_gpus": False, "placement_group_strategy": "STRICT_SPREAD", "cpus_per_bundle": 7}
    with (
        RayVirtualCluster([3], **apart),
        pytest.raises(AllocationTimeoutError, match="room for 0 / 1 of 4 / 8"),
    ):
        RayVirtualCluster([2], bundle_specs=mixed, timeout_s=0)


@pytest.mark.hostile
@pytest.mark.parametrize("unified", [False, True])
def test_parts_of_devices_that_fit_are_granted_however_they_are_told(ray_nodes, unified):
    small, large = BundleSpec(cpus=0, gpus=0.4), BundleSpec(cpus=0, gpus=0.6)
    specs = [[small] * 2, [small, small, *[large] * 3], [large]]
    order = {node.node_id: rank for rank, node in enumerate(node_states())}
    options = {"bundle_specs": specs, "unified": unified, "node_order": order, "max_retries": 3}
    with RayVirtualCluster([2, 5, 1], **options) as cluster:
        assert len(nodes_of(cluster)) == 1
        assert [one.resources["GPU"] for one in cluster.bundles] == [0.4] * 4 + [0.6] * 4
        claim = cluster.claim(range(8), "each")
        asked = [claim.actor_options(i)["scheduling_strategy"] for i in range(8)]
        held = [one.placement_group.bundle_specs[one.placement_group_bundle_index]["GPU"] for one in asked]
        assert held == [0.4] * 4 + [0.6] * 4
        granted = [part["GPU"] for group in cluster.get_placement_groups() for part in group.bundle_specs]
        assert sorted(granted) == held, "in whatever order: only a claim finds a bundle"


@pytest.mark.slow
@pytest.mark.long
def test_whatever_is_planned_is_granted_as_planned(ray_nodes):
    """Random requests, some of them in a cluster that is already partly used."""
    chance, outcomes = random.Random(11), []
    kinds = [BundleSpec(), BundleSpec(cpus=0, gpus=1), BundleSpec(cpus=2, gpus=2), BundleSpec(cpus=4)]
    for _ in range(12):
        counts = [chance.randint(1, 3) for _ in range(chance.randint(1, 3))]
        options = {
            "bundle_specs": [[chance.choice(kinds) for _ in range(count)] for count in counts],
            "placement_group_strategy": chance.choice(["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]),
            "unified": chance.random() < 0.5,
            "node_order": reversed_ranks() if chance.random() < 0.5 else None,
        }
        with RayVirtualCluster([chance.randint(1, 4)], timeout_s=60):
            try:
                with RayVirtualCluster(counts, **options, timeout_s=0.5) as cluster:
                    granted = [
                        node_id
                        for group in cluster.get_placement_groups()
                        for _, node_id in sorted(placement_group_table(group)["bundles_to_node_id"].items())
                    ]
                    assert granted == [bundle.node_id for bundle in cluster.bundles]
                    outcomes.append(True)
            except ResourceInsufficientError as error:
                assert "needed:" in str(error)
                outcomes.append(False)
    assert True in outcomes
