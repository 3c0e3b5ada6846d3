"""The planner and Ray's own scheduler agree, on a cluster with uneven nodes."""

import random

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table

from raycrew.cluster_core import PlacementRequest, plan_cluster
from raycrew.cluster_core._census import take_census
from raycrew.cluster_core._ray_compat import group_state, withdraw_group
from raycrew.cluster_core.testing import clean_up, connected, simulated_nodes

NODES = [
    {"num_cpus": 6, "labels": {"zone": "a"}},
    {"num_cpus": 4, "labels": {"zone": "b"}},
    {"num_cpus": 3, "labels": {"zone": "b"}},
]


@pytest.fixture(scope="module")
def uneven():
    with simulated_nodes(NODES) as nodes, connected(nodes.address):
        yield nodes.address


def ray_grants(count, strategy, selector, expected):
    """Whether Ray grants one group of `count` one-CPU bundles.

    A grant that is expected is waited for; a refusal is what Ray says again after a while.
    """
    group = placement_group(
        [{"CPU": 1}] * count,
        strategy=strategy,
        bundle_label_selector=[selector] * count if selector else None,
    )
    try:
        if expected:
            return group.wait(60)
        for _ in range(600):
            if group.wait(0.1) or group_state(group).scheduling_state in ("INFEASIBLE", "NO_RESOURCES"):
                break
        return group.wait(1)
    finally:
        withdraw_group(group)


def our_answer(counts, strategy, selector):
    plan = plan_cluster(take_census(), PlacementRequest(counts, {"CPU": 1.0}, strategy, selector))
    return plan if plan.feasible else None


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"])
def test_single_groups(uneven, strategy):
    edges = {"STRICT_PACK": (6, 7), "PACK": (13, 14), "SPREAD": (13, 14), "STRICT_SPREAD": (3, 4)}[strategy]
    for count in (1, *edges):
        ours = our_answer((count,), strategy, {})
        assert ray_grants(count, strategy, {}, expected=ours is not None) == (ours is not None), count
        clean_up()


@pytest.mark.slow
def test_label_selectors(uneven):
    for selector in (
        {"zone": "b"},
        {"zone": "!a"},
        {"zone": "in(a,c)"},
        {"zone": "!in(a,b)"},
        {"host": "!x"},
    ):
        ours = our_answer((1,), "PACK", selector)
        assert ray_grants(1, "PACK", selector, expected=ours is not None) == (ours is not None), selector
        clean_up()


@pytest.mark.slow
def test_whatever_is_planned_is_granted_as_planned(uneven):
    """Random requests, some of them in a cluster that is already partly used."""
    from raycrew.cluster_core import RayVirtualCluster, ResourceInsufficientError

    rng = random.Random(7)
    for _ in range(4):
        with RayVirtualCluster([rng.randint(1, 3)], use_gpus=False, timeout_s=60):
            for _ in range(3):
                counts = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
                options = {
                    "use_gpus": False,
                    "placement_group_strategy": rng.choice(
                        ["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]
                    ),
                    "unified": rng.random() < 0.5,
                }
                _await_census()
                plan = RayVirtualCluster.plan(counts, **options)
                if not plan.feasible:
                    with pytest.raises(ResourceInsufficientError):
                        RayVirtualCluster(counts, **options, timeout_s=0)
                    continue
                with RayVirtualCluster(counts, **options) as cluster:
                    granted = [
                        node_id
                        for group in cluster.get_placement_groups()
                        for _, node_id in sorted(placement_group_table(group)["bundles_to_node_id"].items())
                    ]
                    assert granted == [bundle.node_id for bundle in cluster.bundles]


def _await_census():
    """Wait until what the nodes report is what the groups hold."""
    held = sum(
        len(entry["bundles"]) for entry in placement_group_table().values() if entry["state"] == "CREATED"
    )
    for _ in range(600):
        used = sum(node.total["CPU"] - node.free["CPU"] for node in take_census())
        if used == held:
            return
        ray.wait([ray.put(0)], timeout=0.05)
    raise AssertionError(f"{held} CPUs are held, the census says {used}")
