from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycrew.cluster_core import NodeState, PlacementRequest, plan_cluster
from raycrew.cluster_core._planning.request import matches

pytestmark = pytest.mark.smoke

GPU = {"GPU": 1.0}


def node(number, total, free=None, **labels):
    free = total if free is None else free
    amounts = [{"CPU": 64.0, "GPU": float(gpus)} for gpus in (total, free)]
    return NodeState(f"n{number}", f"10.0.0.{number}", *amounts, labels=labels)


def test_nodes_in_use_are_filled_first_so_that_whole_nodes_stay_whole():
    nodes = [node(0, 8), node(1, 8, free=4), node(2, 8, free=2)]
    plan = plan_cluster(nodes, PlacementRequest((2, 3, 8), GPU))
    assert plan.node_ids == (("n2",) * 2, ("n1",) * 3, ("n0",) * 8)


def test_logical_nodes_of_one_size_lie_in_the_order_of_the_nodes_and_holes_stay():
    nodes = [node(i, 8) for i in range(4)]
    plan = plan_cluster(nodes, PlacementRequest((8, 0, 8, 8), GPU))
    assert plan.node_ids == (("n0",) * 8, (), ("n1",) * 8, ("n2",) * 8)


def test_a_node_that_is_being_drained_takes_nothing():
    nodes = [replace(node(0, 8), draining=True), node(1, 8)]
    assert plan_cluster(nodes, PlacementRequest((4,), GPU)).node_ids == (("n1",) * 4,)
    plan = plan_cluster(nodes, PlacementRequest((8, 1), GPU))
    assert plan.impossible and "takes nothing new, as it is being drained" in plan.reasons[1]


def test_a_search_finds_what_greed_misses():
    nodes = [node(0, 6), node(1, 4)]
    assert plan_cluster(nodes, PlacementRequest((4, 3, 3), GPU)).node_ids == (
        ("n1",) * 4,
        ("n0",) * 3,
        ("n0",) * 3,
    )
    nodes = [node(0, 10), node(1, 10)]  # Best fit, largest first, puts 5 + 4 together and has no 3 + 3 left.
    plan = plan_cluster(nodes, PlacementRequest((4, 4, 3, 3, 3, 3), GPU))
    assert plan.feasible


@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        ("PACK", (("n0",) * 3 + ("n1",),)),
        ("SPREAD", (("n0", "n0", "n1", "n1"),)),
        ("STRICT_PACK", None),
        ("STRICT_SPREAD", None),
    ],
)
def test_strategies_say_how_the_bundles_of_one_logical_node_lie(strategy, where):
    plan = plan_cluster([node(0, 3), node(1, 3)], PlacementRequest((4,), GPU, strategy))
    assert plan.feasible == (where is not None)
    assert plan.impossible == (where is None)
    if where:
        assert plan.node_ids == where


def test_strict_spread_takes_the_emptiest_nodes_first():
    nodes = [node(0, 1), node(1, 2), node(2, 3)]
    plan = plan_cluster(nodes, PlacementRequest((2, 2, 2), GPU, "STRICT_SPREAD"))
    assert plan.feasible
    assert all(len(set(one)) == 2 for one in plan.node_ids)


def test_labels_in_rays_notation():
    nodes = [node(0, 8, zone="a"), node(1, 8, zone="b"), node(2, 8)]
    for wanted, where in {"b": "n1", "!a": "n1", "in(b,c)": "n1", "!in(a, b)": "n2"}.items():
        plan = plan_cluster(nodes, PlacementRequest((8,), GPU, label_selector={"zone": wanted}))
        assert plan.node_ids[0][0] == where
    plan = plan_cluster(nodes, PlacementRequest((8,), GPU, label_selector={"zone": "z"}))
    assert plan.impossible
    assert "its labels don't fit" in plan.reasons[1]


def test_segments_lie_in_one_domain_each():
    nodes = [node(i, 8, **{"ray.io/gpu-domain": "d" + "0010111"[i]}) for i in range(7)]
    plan = plan_cluster(nodes, PlacementRequest((8,) * 6, GPU, segment_size=3))
    assert [one[0] for one in plan.node_ids] == ["n0", "n1", "n3", "n2", "n4", "n5"]
    plan = plan_cluster(nodes, PlacementRequest((8,) * 5, GPU, segment_size=5))
    assert plan.impossible
    assert "2 such domains" in plan.reasons[1]
    assert (
        "no node has that label"
        in plan_cluster([node(0, 8)], PlacementRequest((8,), GPU, segment_size=1)).reasons[1]
    )


def test_reasons_say_per_node_what_is_needed_free_and_held():
    nodes = [node(0, 8, free=2), node(1, 8, free=1)]
    plan = plan_cluster(nodes, PlacementRequest((8,), GPU), {"n0": ["placement group 'policy' (6 GPU)"]})
    assert not plan.impossible
    assert plan.reasons == (
        "needed: 1 x 8 bundles of 1 GPU, STRICT_PACK per node; "
        "there is room for 3 of them, on empty nodes for 16",
        "node 10.0.0.0 (n0): room for 2 of 8: 2 of 8 GPU free; held by placement group 'policy' (6 GPU)",
        "node 10.0.0.1 (n1): room for 1 of 8: 1 of 8 GPU free; holder unknown",
    )
    many = plan_cluster([node(i, 8) for i in range(1000)], PlacementRequest((9,), GPU)).reasons
    assert many[-1] == "and 984 more nodes: 984 with room for 8"
    assert len(many) < 20
    assert "no node takes work" in plan_cluster([], PlacementRequest((1,), GPU)).reasons


def in_domains(*rooms):
    """A node per pair of domain and room."""
    return [node(i, room, **{"ray.io/gpu-domain": name}) for i, (name, room) in enumerate(rooms)]


def first_nodes(nodes, counts, **fields):
    plan = plan_cluster(nodes, PlacementRequest(counts, GPU, **fields))
    return [one[0] if one else None for one in plan.node_ids]


def test_the_largest_segment_comes_first_and_takes_the_tightest_domain():
    nodes = in_domains(("wide", 8), ("wide", 8), ("tight", 8))
    assert first_nodes(nodes, (4, 8), segment_size=1) == ["n0", "n2"]
    assert first_nodes(nodes, (4, 4), segment_size=1) == ["n2", "n2"]


def test_segments_share_a_domain_as_far_as_it_has_room():
    nodes = in_domains(("a", 8), ("b", 9))
    assert first_nodes(nodes, (4, 4, 4, 4), segment_size=1) == ["n0", "n0", "n1", "n1"]
    assert first_nodes(nodes, (4, 4, 5, 5), segment_size=1) == []


def test_a_domain_without_room_for_one_shape_is_there_for_others():
    nodes = in_domains(("halves", 4), ("halves", 4), ("whole", 8))
    assert first_nodes(nodes, (8, 4, 4), segment_size=1) == ["n2", "n0", "n1"]
    assert first_nodes(nodes, (4, 4, 8, 0), segment_size=1) == ["n0", "n1", "n2", None]
    nodes += in_domains(("halves", 4), ("halves", 4), ("whole", 8), ("other", 8))[3:]
    assert first_nodes(nodes, (8, 8), segment_size=1) == ["n2", "n3"]


def test_reasons_name_the_largest_first_and_say_nothing_where_nothing_is_missing():
    nodes = [node(0, 8), replace(node(1, 4), draining=True), node(2, 8, zone="b")]
    request = PlacementRequest((3, 9, 3), {**GPU, "CPU": 0}, label_selector={"zone": "!b"})
    assert plan_cluster(nodes, request).reasons == (
        "needed: 1 x 9 + 2 x 3 bundles of 1 GPU, 0 CPU, STRICT_PACK per node; "
        "there is room for 8 of them, on empty nodes for 8",
        "node 10.0.0.0 (n0): room for 8 of 8: 8 of 8 GPU free, 64 of 64 CPU free",
        "node 10.0.0.1 (n1): takes nothing new, as it is being drained",
        "node 10.0.0.2 (n2): its labels don't fit {'zone': '!b'}",
    )


def test_reasons_list_sixteen_nodes_and_count_the_rest_by_their_room():
    def reasons(free):
        return plan_cluster([node(i, 8, f) for i, f in enumerate(free)], PlacementRequest((9,), GPU)).reasons

    assert len(reasons([8] * 16)) == 18
    assert reasons([8] * 16)[-1].startswith("node 10.0.0.15 ")
    assert reasons([8] * 17)[-1] == "and 1 more nodes: 1 with room for 8"
    assert reasons([8] * 16 + [5, 0, 5])[-1] == "and 3 more nodes: 1 with room for 0, 2 with room for 5"


def test_reasons_say_of_a_node_without_the_resource_that_it_has_none():
    cpus = NodeState("0123456789abcdef", "10.0.0.9", {"CPU": 4.0}, {"CPU": 4.0})
    reasons = plan_cluster([cpus], PlacementRequest((1,), GPU)).reasons
    assert reasons[2] == "node 10.0.0.9 (01234567): room for 0 of 0: 0 of 0 GPU free"


def test_segments_are_of_nodes_with_bundles():
    assert PlacementRequest((1, 0, 1), GPU, segment_size=2).segment_size == 2
    with pytest.raises(ValueError, match="segment_size 2 does not divide 3, the nodes with bundles"):
        PlacementRequest((1, 0, 1, 1), GPU, segment_size=2)
    with pytest.raises(ValueError, match="-1 does not divide 2"):
        PlacementRequest((1, 1), GPU, segment_size=-1)


def test_a_plan_that_only_waits_is_not_impossible():
    nodes = [node(0, 8, free=7)]
    plan = plan_cluster(nodes, PlacementRequest((8,), GPU))
    assert (plan.feasible, plan.impossible, plan.node_ids) == (False, False, ())
    plan = plan_cluster(nodes, PlacementRequest((7,), GPU))
    assert (plan.feasible, plan.impossible, plan.reasons) == (True, False, ())


def test_fractions_lose_nothing():
    cpus = NodeState("n", "a", {"CPU": 0.3}, {"CPU": 0.1 + 0.2})
    assert plan_cluster([cpus], PlacementRequest((3,), {"CPU": 0.1})).feasible
    assert not plan_cluster([cpus], PlacementRequest((4,), {"CPU": 0.1})).feasible


def test_distinct_nodes_have_one_logical_node_each():
    nodes = [node(0, 8), node(1, 4), node(2, 2)]
    plan = plan_cluster(nodes, PlacementRequest((1, 2, 4), GPU, distinct_nodes=True))
    assert [one[0] for one in plan.node_ids] == ["n0", "n2", "n1"]
    assert not plan_cluster(nodes, PlacementRequest((1, 1, 1, 1), GPU, distinct_nodes=True)).feasible
    nodes = [node(i, 8, **{"ray.io/gpu-domain": "ab"[i // 2]}) for i in range(4)]
    request = PlacementRequest((1,) * 4, GPU, segment_size=2, distinct_nodes=True)
    assert [one[0] for one in plan_cluster(nodes, request).node_ids] == ["n0", "n1", "n2", "n3"]


@pytest.mark.parametrize(
    "fields",
    [
        {"bundle": {}},
        {"bundle": {"GPU": 0}},
        {"bundle": {"GPU": 1, "CPU": -1}},
        {"strategy": "LOOSE"},
        {"segment_size": 0},
        {"segment_size": 2},
        {"label_selector": {"zone": ""}},
        {"bundle_counts": ()},
        {"bundle_counts": (0, 0)},
        {"bundle_counts": (1, -1)},
    ],
)
def test_requests_that_mean_nothing_are_refused(fields):
    with pytest.raises(ValueError):
        PlacementRequest(**{"bundle_counts": (1, 1, 1), **fields})


@given(
    rooms=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    strategy=st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
)
@settings(max_examples=300)
def test_a_plan_exists_exactly_when_one_can(rooms, counts, strategy):
    nodes = [node(i, room) for i, room in enumerate(rooms)]
    plan = plan_cluster(nodes, PlacementRequest(tuple(counts), GPU, strategy))
    assert plan.feasible == _possible(tuple(rooms), tuple(counts), strategy)
    if not plan.feasible:
        return
    taken = [where for one in plan.node_ids for where in one]
    assert all(taken.count(f"n{i}") <= room for i, room in enumerate(rooms))
    assert [len(one) for one in plan.node_ids] == counts
    if strategy == "STRICT_PACK":
        assert all(len(set(one)) == 1 for one in plan.node_ids)
    if strategy == "STRICT_SPREAD":
        assert all(len(set(one)) == len(one) for one in plan.node_ids)


def _possible(rooms, counts, strategy):
    """Every way of laying the first count, by brute force."""
    if not counts:
        return True
    if strategy in ("PACK", "SPREAD"):
        return sum(counts) <= sum(rooms)
    if strategy == "STRICT_PACK":
        tries = [tuple(counts[0] * (i == j) for j in range(len(rooms))) for i in range(len(rooms))]
    else:
        tries = [
            tuple(bits >> j & 1 for j in range(len(rooms)))
            for bits in range(2 ** len(rooms))
            if bits.bit_count() == counts[0]
        ]
    return any(
        _possible(left, counts[1:], strategy)
        for one in tries
        if min(left := tuple(room - part for room, part in zip(rooms, one, strict=True))) >= 0
    )


def test_ten_thousand_nodes_in_segments():
    nodes = [node(i, 8, **{"ray.io/gpu-domain": f"d{i // 18}"}) for i in range(10_000)]
    plan = plan_cluster(nodes, PlacementRequest((8,) * 4096, GPU, segment_size=16))
    domains = {n.node_id: n.labels["ray.io/gpu-domain"] for n in nodes}
    assert all(len({domains[one[0]] for one in plan.node_ids[i : i + 16]}) == 1 for i in range(0, 4096, 16))


def test_what_is_no_selector_matches_nothing():
    assert not matches({"a": "b"}, {"a": ""})
    assert not matches({"a": "b"}, {"a": "b c"})
    assert matches({"a": "b"}, {"a": "b"})
    assert matches({}, {"a": "!in(b, c)"})
