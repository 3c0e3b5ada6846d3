"""The planner and Ray's own scheduler agree, on a cluster with uneven nodes."""

import random

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from raycrew.cluster_core import PlacementRequest, plan_cluster
from raycrew.cluster_core._census import take_census
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


def rays_answer(count, strategy, selector):
    """Whether Ray grants one group of `count` one-CPU bundles, and which nodes it uses."""
    group = placement_group(
        [{"CPU": 1}] * count,
        strategy=strategy,
        bundle_label_selector=[selector] * count if selector else None,
    )
    try:
        if not group.wait(2.5):
            return None
        return list(placement_group_table(group)["bundles_to_node_id"].values())
    finally:
        remove_placement_group(group)


def our_answer(counts, strategy, selector):
    plan = plan_cluster(take_census(), PlacementRequest(counts, {"CPU": 1.0}, strategy, selector))
    return plan if plan.feasible else None


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"])
def test_single_groups(uneven, strategy):
    edges = {"STRICT_PACK": (6, 7), "PACK": (13, 14), "SPREAD": (13, 14), "STRICT_SPREAD": (3, 4)}[strategy]
    for count in (1, *edges):
        theirs = rays_answer(count, strategy, {})
        clean_up()
        ours = our_answer((count,), strategy, {})
        assert (ours is None) == (theirs is None), f"{strategy} {count}"


@pytest.mark.slow
def test_label_selectors(uneven):
    for selector in (
        {"zone": "b"},
        {"zone": "!a"},
        {"zone": "in(a,c)"},
        {"zone": "!in(a,b)"},
        {"host": "!x"},
    ):
        theirs = rays_answer(1, "PACK", selector)
        clean_up()
        ours = our_answer((1,), "PACK", selector)
        assert (ours is None) == (theirs is None), selector


@pytest.mark.slow
def test_whatever_is_planned_is_granted_as_planned(uneven):
    """Random requests, some of them in a cluster that is already partly used."""
    from raycrew.cluster_core import RayVirtualCluster, ResourceInsufficientError

    rng = random.Random(7)
    for _ in range(12):
        counts = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
        strategy = rng.choice(["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"])
        with RayVirtualCluster([rng.randint(1, 3)], use_gpus=False, timeout_s=60):
            _await_census()
            plan = RayVirtualCluster.plan(counts, use_gpus=False, placement_group_strategy=strategy)
            if not plan.feasible:
                with pytest.raises(ResourceInsufficientError):
                    RayVirtualCluster(counts, use_gpus=False, placement_group_strategy=strategy, timeout_s=0)
                continue
            with RayVirtualCluster(
                counts, use_gpus=False, placement_group_strategy=strategy, unified=rng.random() < 0.5
            ) as cluster:
                granted = [
                    node_id
                    for group in cluster.get_placement_groups()
                    for _, node_id in sorted(placement_group_table(group)["bundles_to_node_id"].items())
                ]
                assert granted == [node_id for one in plan.node_ids for node_id in one]
        clean_up()


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
