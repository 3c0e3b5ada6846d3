"""Placement groups as they are to be, without Ray."""

from raycrew.cluster_core._placement.wanted import Wanted, devices_of, unplaced_group, wanted_groups
from raycrew.cluster_core._planning import PlacementPlan, PlacementRequest

GPU = {"GPU": 1.0}
REQUEST = PlacementRequest((2, 0, 1), GPU, strategy="PACK")
PLAN = PlacementPlan((("a", "b"), (), ("b",)))


def test_each_logical_node_with_bundles_has_a_group_where_the_plan_has_it():
    assert wanted_groups("run", REQUEST, PLAN, unified=False) == [
        Wanted("run-node0", "PACK", (0, 0), ("a", "b"), (GPU, GPU), (0, 1)),
        Wanted("run-node2", "PACK", (2,), ("b",), (GPU,), (2,)),
    ]


def test_a_unified_group_has_all_bundles_in_order():
    (only,) = wanted_groups("run", REQUEST, PLAN, unified=True)
    assert only == Wanted("run", "PACK", (0, 0, 2), ("a", "b", "b"), (GPU, GPU, GPU), (0, 1, 2))


def test_bundles_stand_in_the_order_in_which_ray_grants_them():
    small, large = {"GPU": 0.4}, {"GPU": 0.6}
    request = PlacementRequest((1, 4), bundles=((small,), (small, small, large, large)))
    order = ((1, 2), (1, 0), (1, 3), (1, 1), (0, 0))
    plan = PlacementPlan((("a",), ("b",) * 4), order=order)
    assert wanted_groups("run", request, plan, unified=False) == [
        Wanted("run-node1", "STRICT_PACK", (1,) * 4, ("b",) * 4, (large, small, large, small), (3, 1, 4, 2)),
        Wanted("run-node0", "STRICT_PACK", (0,), ("a",), (small,), (0,)),
    ]
    (only,) = wanted_groups("run", request, plan, unified=True)
    assert only.seats == (3, 1, 4, 2, 0) and only.node_indices == (1, 1, 1, 1, 0)
    asked = (small, small, small, large, large)
    assert only.bundles == tuple(asked[seat] for seat in only.seats), "seats tell which bundle is where"


def test_what_an_autoscaler_is_shown_names_no_node():
    assert unplaced_group("run", REQUEST, 0) == Wanted("run-wanted0", "PACK", (0, 0), (), (GPU, GPU))


def test_the_devices_of_a_group_are_those_of_its_logical_nodes():
    (only,) = wanted_groups("run", REQUEST, PlacementPlan((("a", "a"), (), ("a",))), unified=True)
    assert devices_of(only, ((4, 5), (), (1,))) == {"a": [4, 5, 1]}
