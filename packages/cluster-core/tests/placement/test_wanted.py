"""Placement groups as they are to be, without Ray."""

from raycrew.cluster_core._placement.wanted import Wanted, devices_of, unplaced_group, wanted_groups
from raycrew.cluster_core._planning import PlacementPlan, PlacementRequest

GPU = {"GPU": 1.0}
REQUEST = PlacementRequest((2, 0, 1), GPU, strategy="PACK")
PLAN = PlacementPlan((("a", "b"), (), ("b",)))


def test_each_logical_node_with_bundles_has_a_group_where_the_plan_has_it():
    assert wanted_groups("run", REQUEST, PLAN, unified=False) == [
        Wanted("run-node0", "PACK", (0, 0), ("a", "b"), (GPU, GPU)),
        Wanted("run-node2", "PACK", (2,), ("b",), (GPU,)),
    ]


def test_a_unified_group_has_all_bundles_in_order():
    (only,) = wanted_groups("run", REQUEST, PLAN, unified=True)
    assert only == Wanted("run", "PACK", (0, 0, 2), ("a", "b", "b"), (GPU, GPU, GPU))


def test_what_an_autoscaler_is_shown_names_no_node():
    assert unplaced_group("run", REQUEST, 0) == Wanted("run-wanted0", "PACK", (0, 0), (), (GPU, GPU))


def test_the_devices_of_a_group_are_those_of_its_logical_nodes():
    (only,) = wanted_groups("run", REQUEST, PlacementPlan((("a", "a"), (), ("a",))), unified=True)
    assert devices_of(only, ((4, 5), (), (1,))) == {"a": [4, 5, 1]}
