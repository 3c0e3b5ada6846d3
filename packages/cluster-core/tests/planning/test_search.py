"""Orders of nodes, bundles that differ, selectors per node: compared with trying everything."""

import itertools
import pickle
import random
from dataclasses import replace

import pytest

from raycrew.cluster_core import NodeState, PlacementRequest, plan_cluster

pytestmark = pytest.mark.smoke

GPU = {"GPU": 1.0}
LABELS = {"ray.io/gpu-domain": "d"}


def node(number, gpus, domain=None, **amounts):
    total = {"CPU": 64.0, "GPU": float(gpus), **amounts}
    labels = {} if domain is None else {"ray.io/gpu-domain": domain}
    return NodeState(f"n{number}", f"10.0.0.{number}", total, total, labels)


def ranks(*ids):
    return {node_id: rank for rank, node_id in enumerate(ids)}


def first_nodes(nodes, counts, **fields):
    plan = plan_cluster(nodes, PlacementRequest(counts, GPU, **fields))
    return [one[0] if one else None for one in plan.node_ids]


def is_laid(request, nodes, placed):
    """Whether nodes for each bundle are what a request asks for."""
    left = {one.node_id: dict(one.free) for one in nodes}
    facts = {one.node_id: one for one in nodes}
    for logical, where in enumerate(placed):
        for bundle, node_id in zip(request.bundles_of(logical), where, strict=True):
            wanted = request.selector_of(logical)
            if facts[node_id].draining or any(facts[node_id].labels.get(k) != v for k, v in wanted.items()):
                return False
            for name, amount in bundle.items():
                left[node_id][name] = left[node_id].get(name, 0.0) - amount
        if request.strategy == "STRICT_PACK" and len(set(where)) > 1:
            return False
        if request.strategy == "STRICT_SPREAD" and len(set(where)) < len(where):
            return False
    if request.distinct_nodes and any({*one} & {*other} for one, other in itertools.combinations(placed, 2)):
        return False
    if min(amount for one in left.values() for amount in one.values()) < -1e-9:
        return False
    if not all(devices_hold(round(one.free.get("GPU", 0)), on_node(request, placed, one)) for one in nodes):
        return False
    filled = [where for where in placed if where]
    size = request.segment_size
    for start in range(0, len(filled) if size else 0, size or 1):
        inside = {
            facts[n].labels.get("ray.io/gpu-domain") for one in filled[start : start + size] for n in one
        }
        if len(inside) != 1 or None in inside:
            return False
    return True


def on_node(request, placed, one):
    """What each bundle that lies on a node takes of its devices."""
    return [
        bundle["GPU"]
        for logical, where in enumerate(placed)
        for bundle, node_id in zip(request.bundles_of(logical), where, strict=True)
        if node_id == one.node_id and bundle.get("GPU")
    ]


def devices_hold(number, shares):
    """Whether so many devices hold these shares in any way."""
    whole = sum(share for share in shares if share >= 1)
    parts = [share for share in shares if share < 1]
    ways = itertools.product(range(int(number - whole)), repeat=len(parts)) if number >= whole else ()
    return any(
        all(sum(p for p, at in zip(parts, way, strict=True) if at == d) < 1 + 1e-9 for d in set(way))
        for way in ways
    )


def all_ways(request, nodes):
    """All that is asked for, in the order of the nodes."""
    ids = [one.node_id for one in nodes]
    choices = []
    for count in request.bundle_counts:
        if request.strategy == "STRICT_PACK":
            choices.append([(node_id,) * count for node_id in ids] if count else [()])
        else:
            choices.append(list(itertools.product(ids, repeat=count)))
    return (way for way in itertools.product(*choices) if is_laid(request, nodes, way))


def some_request(chance, strategy, *, distinct_nodes=False):
    counts = [chance.randint(0, 2) for _ in range(chance.randint(1, 3))]
    counts[0] = counts[0] or 1
    kinds = [{"GPU": 1.0}, {"CPU": 3.0}, {"GPU": 2.0, "CPU": 1.0}, {"memory": 2e9, "CPU": 0.5}]
    kinds += [{"GPU": 0.6}, {"GPU": 0.5, "CPU": 1.0}] if chance.random() < 0.5 else []
    bundles = tuple(tuple(chance.choice(kinds) for _ in range(count)) for count in counts)
    selectors = tuple(chance.choice([{}, {}, {"zone": "a"}]) for _ in counts)
    filled = sum(count > 0 for count in counts)
    segment = chance.choice([None, 1, filled])
    return PlacementRequest(
        tuple(counts),
        strategy=strategy,
        bundles=bundles,
        node_selectors=selectors,
        segment_size=segment,
        distinct_nodes=distinct_nodes,
    )


def some_nodes(chance):
    nodes = []
    for number in range(chance.randint(1, 3)):
        total = {"CPU": float(chance.randint(0, 4)), "GPU": float(chance.randint(0, 3)), "memory": 3e9}
        labels = {"zone": chance.choice("ab"), "ray.io/gpu-domain": chance.choice("de")}
        nodes.append(NodeState(f"n{number}", f"10.0.0.{number}", total, total, labels))
    return nodes


@pytest.mark.parametrize("strategy", ["STRICT_PACK", "STRICT_SPREAD", "PACK", "SPREAD", "DISTINCT"])
@pytest.mark.parametrize("ordered", [False, True])
def test_what_fits_is_found_and_nothing_else(strategy, ordered):
    chance, outcomes, distinct = random.Random(strategy), [], strategy == "DISTINCT"
    strategy = "STRICT_PACK" if distinct else strategy
    for _ in range(300):
        nodes, request = some_nodes(chance), some_request(chance, strategy, distinct_nodes=distinct)
        if ordered:
            ids = [one.node_id for one in nodes]
            chance.shuffle(ids)
            request = replace(request, node_order=ranks(*ids))
            nodes_in_order = sorted(nodes, key=lambda one: ids.index(one.node_id))
        plan = plan_cluster(nodes, request)
        ways = all_ways(request, nodes_in_order if ordered else nodes)
        first = next(ways, None)
        assert plan.feasible == (first is not None), (nodes, request)
        assert plan.impossible == (first is None)
        outcomes.append(plan.feasible)
        if plan.feasible:
            assert is_laid(request, nodes, plan.node_ids)
            assert plan == plan_cluster(nodes, request)
        if plan.feasible and ordered and strategy.startswith("STRICT_"):
            assert plan.node_ids == first, "there is a way earlier in the order"
    assert min(outcomes.count(True), outcomes.count(False)) > 30


@pytest.mark.parametrize("segment_size", [None, 1, 2])
def test_with_an_order_the_same_fits_as_without(segment_size):
    chance, outcomes = random.Random(3), []
    for _ in range(300):
        nodes = [node(i, chance.randint(1, 6), chance.choice("de")) for i in range(chance.randint(2, 5))]
        counts = tuple(chance.randint(1, 4) for _ in range(2 * chance.randint(1, 3)))
        request = PlacementRequest(counts, GPU, segment_size=segment_size)
        plan = plan_cluster(nodes, request)
        ordered = plan_cluster(nodes, replace(request, node_order=lambda one: -int(one.node_id[1:])))
        assert (plan.feasible, plan.impossible) == (ordered.feasible, ordered.impossible)
        outcomes.append(plan.feasible)
    assert min(outcomes.count(True), outcomes.count(False)) > 30


def test_logical_nodes_take_the_first_that_fit_in_the_order():
    nodes = [node(0, 8), node(1, 4), node(2, 8)]
    assert first_nodes(nodes, (4, 4, 8)) == ["n1", "n2", "n0"], "without an order the tightest come first"
    assert first_nodes(nodes, (4, 4, 8), node_order=ranks("n2", "n1", "n0")) == ["n2", "n2", "n0"]
    assert first_nodes(nodes, (4, 4, 8), node_order=lambda one: one.free["GPU"]) == ["n1", "n0", "n2"]
    assert first_nodes(nodes, (8, 0, 8), node_order=ranks("n2", "n0")) == ["n2", None, "n0"]


def test_segments_take_the_first_domains_that_fit_in_the_order():
    nodes = [node(i, 1, "A") for i in range(8)] + [node(8 + i, 1, "B") for i in range(4)]
    counts = (1,) * 8
    tightest = [f"n{i}" for i in (8, 9, 10, 11, 0, 1, 2, 3)]
    assert first_nodes(nodes, counts, segment_size=4) == tightest
    order = {one.node_id: int(one.node_id[1:]) for one in nodes}
    assert first_nodes(nodes, counts, segment_size=4, node_order=order) == [f"n{i}" for i in range(8)]
    back = first_nodes(nodes, counts, segment_size=4, node_order=lambda one: -order[one.node_id])
    assert back == [f"n{i}" for i in (11, 10, 9, 8, 7, 6, 5, 4)]


def test_an_earlier_node_is_left_where_the_rest_would_not_fit():
    nodes = [node(0, 8), node(1, 4), node(2, 2)]
    assert first_nodes(nodes, (2, 3, 8), node_order=ranks("n0", "n1", "n2")) == ["n2", "n1", "n0"]
    many = [node(i, 8) for i in range(50)] + [node(50 + i, 4) for i in range(100)]
    plan = plan_cluster(many, PlacementRequest((4,) * 100 + (8,) * 50, GPU, node_order=lambda one: 0))
    assert plan.node_ids[0] == ("n50",) * 4 and plan.node_ids[-1] == ("n49",) * 8


@pytest.mark.parametrize("count", [400, 2000])
def test_an_order_of_many_nodes_is_planned_at_once(count):
    nodes = [node(i, 8, f"d{i // 16}") for i in range(count)]
    request = PlacementRequest((8,) * (count // 2), GPU, segment_size=10, node_order=lambda one: one.address)
    assert plan_cluster(nodes, request).feasible


@pytest.mark.hostile
def test_nodes_without_a_rank_come_last_and_ties_keep_their_order():
    nodes = [node(i, 1) for i in range(5)]
    assert first_nodes(nodes, (1,) * 5, node_order=ranks("n4", "gone", "n2")) == [
        "n4",
        "n2",
        "n0",
        "n1",
        "n3",
    ]
    assert first_nodes(nodes, (1,) * 5, node_order=lambda one: None if one.node_id == "n0" else 1) == [
        "n1", "n2", "n3", "n4", "n0",
    ]  # fmt: skip
    assert first_nodes(nodes, (1,), node_order=dict.fromkeys(["n3", "n1"], 7)) == ["n1"]


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("order", "error", "said"),
    [
        (["n0", "n1"], TypeError, "mapping of node ids to ranks"),
        ({0: 1}, TypeError, "0 is not a node id"),
        ({"n0": "first"}, TypeError, "the rank 'first' of node n0 is not a number"),
        ({"n0": float("nan")}, ValueError, "is not a number"),
        ({"10.0.0.0": 1}, ValueError, "none is a node of this cluster; one of those is 'n0'"),
        ({}, ValueError, "ranks 0 node ids"),
        (lambda one: one.labels["rack"], ValueError, "raised KeyError for node 10.0.0.0"),
        (lambda one: float("nan"), ValueError, "is not a number"),
        (lambda one: {one.node_id}, TypeError, "which has no order"),
        (lambda one: "a" if one.node_id == "n0" else 1, TypeError, "can't be compared"),
    ],
)
def test_what_is_no_order_is_refused(order, error, said):
    nodes = [node(0, 8), node(1, 8)]
    with pytest.raises(error, match=said):
        plan_cluster(nodes, PlacementRequest((1, 1), GPU, node_order=order))


def test_bundles_of_different_kinds_share_a_node():
    trainer, sandbox = {"GPU": 1.0, "CPU": 4.0}, {"CPU": 16.0, "memory": 8e9}
    nodes = [node(0, 8, memory=4e9), node(1, 4, memory=12e9), node(2, 0, memory=64e9)]
    request = PlacementRequest((5, 1), bundles=((trainer,) * 4 + (sandbox,), (sandbox,)))
    assert plan_cluster(nodes, request).node_ids == (("n1",) * 5, ("n2",))
    packed = replace(request, strategy="PACK", node_order=ranks("n0", "n1", "n2"))
    assert plan_cluster(nodes, packed).node_ids == (("n1",) * 5, ("n2",))
    assert pickle.loads(pickle.dumps(packed)) == packed


def test_each_logical_node_may_have_labels_of_its_own():
    nodes = [replace(node(i, 8), labels={"kind": kind}) for i, kind in enumerate(["h100", "a100", "h100"])]
    request = PlacementRequest((8, 8), GPU, node_selectors=({"kind": "a100"}, {"kind": "!a100"}))
    assert plan_cluster(nodes, request).node_ids == (("n1",) * 8, ("n0",) * 8)
    assert plan_cluster(nodes, replace(request, label_selector={"kind": "h100"})).feasible, (
        "its own goes first"
    )
    plan = plan_cluster(nodes[:1], request)
    assert plan.impossible and "room for 8 of 8" in plan.reasons[1]


def test_reasons_tell_the_kinds_apart():
    trainer, sandbox = {"GPU": 1.0}, {"CPU": 48.0}
    request = PlacementRequest((3, 1), bundles=((trainer, trainer, sandbox), (sandbox,)))
    plan = plan_cluster([node(0, 8)], request)
    assert plan.reasons == (
        "needed: 1 x [2 x (1 GPU) + 1 x (48 CPU)] + 1 x [1 x (48 CPU)], STRICT_PACK per node; "
        "there is room for 8 / 1 of each kind alone, on empty nodes for 8 / 1",
        "node 10.0.0.0 (n0): room for 8 / 1 of 8 / 1: 8 of 8 GPU free, 64 of 64 CPU free",
    )
    assert plan.impossible


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bundles": ((GPU,), (GPU, GPU))}, r"bundles has \[1, 2\] entries per node for the counts \[2, 1\]"),
        ({"bundles": ((GPU, {}), (GPU,))}, "at least one positive amount"),
        ({"bundles": ((GPU, {"CPU": -1.0}), (GPU,))}, "at least one positive amount"),
        ({"bundles": ((GPU, {"CPU": float("inf")}), (GPU,))}, "each is finite"),
        ({"bundles": ((GPU, {"CPU": 1.0, "GPU": float("nan")}), (GPU,))}, "each is finite"),
        ({"bundles": ((GPU, {"": 1.0}), (GPU,))}, "a resource has a name"),
        ({"node_selectors": ({"a": "b"},)}, "1 label selectors for 2 nodes"),
        ({"node_selectors": ({"a": "b"}, {"a": ""})}, "label selector 'a': '' is not one of"),
    ],
)
def test_requests_that_contradict_themselves_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        PlacementRequest((2, 1), **fields)


@pytest.mark.hostile
def test_a_search_that_would_take_for_ever_ends_and_says_so():
    """Amounts of which a few sums are just right: more ways than anybody would try."""
    chance = random.Random(7)
    amounts = [float(chance.randint(500, 1500)) for _ in range(60)]
    rooms = [sum(amounts[start : start + 6]) for start in range(0, 60, 6)]
    rooms[0], rooms[1] = rooms[0] + 1, rooms[1] - 1
    chance.shuffle(amounts)
    request = PlacementRequest((1,) * 60, bundles=tuple(({"CPU": amount},) for amount in amounts))
    nodes = [replace(node(i, 0), total={"CPU": room}, free={"CPU": room}) for i, room in enumerate(rooms)]
    plan = plan_cluster(nodes, request)
    assert plan.feasible or (
        "there may be a way that was not found" in plan.reasons[-1] and not plan.impossible
    )


def test_a_logical_node_larger_than_any_node_is_told_what_would_fit():
    reasons = plan_cluster([node(0, 8), node(1, 8)], PlacementRequest((16,), GPU)).reasons
    assert reasons[1] == (
        "STRICT_PACK keeps the 16 bundles of a logical node on one physical node, and the largest holds 8; "
        "the counts [8, 8] or placement_group_strategy='PACK' would fit on empty nodes"
    )
    assert (
        "the counts [5, 4, 4]"
        in plan_cluster([node(0, 8), node(1, 8)], PlacementRequest((9, 4), GPU)).reasons[1]
    )
    assert not any(
        "would fit" in one for one in plan_cluster([node(0, 8)], PlacementRequest((16,), GPU)).reasons
    )


@pytest.mark.parametrize(
    ("number", "told"), [(8, "the counts [8, 8, 8, 8, 8, 8, 8, 8]"), (9, "9 x 8 logical nodes")]
)
def test_many_counts_that_would_fit_are_told_in_short(number, told):
    nodes = [node(i, 8) for i in range(number)]
    assert f"; {told} or " in plan_cluster(nodes, PlacementRequest((8 * number,), GPU)).reasons[1]


def test_who_only_waits_or_fits_nowhere_is_told_of_no_other_counts():
    full = replace(node(0, 8), free={"CPU": 64.0, "GPU": 7.0})
    for nodes in ([full], [node(0, 0)]):
        reasons = plan_cluster(nodes, PlacementRequest((8,), GPU)).reasons
        assert reasons and not any("would fit" in reason for reason in reasons)


def test_a_resource_that_no_node_has_is_named():
    cpus = NodeState("n0", "10.0.0.0", {"CPU": 8.0}, {"CPU": 8.0})
    reasons = plan_cluster([cpus], PlacementRequest((1,))).reasons
    assert reasons[1] == "no node has any GPU; RayVirtualCluster(use_gpus=False) asks for none"
    told = PlacementRequest((1,), bundles=(({"GPU": 1.0},),))
    assert plan_cluster([cpus], told).reasons[1] == "no node has any GPU; BundleSpec(gpus=0) asks for none"
    reasons = plan_cluster([cpus], PlacementRequest((1,), {"NPU": 1.0})).reasons
    assert reasons[1] == "no node has any NPU"
    reasons = plan_cluster([node(0, 8, NPU=4.0)], PlacementRequest((1,), {"CPU": 1.0, "APU": 1.0})).reasons
    assert reasons[1] == "no node has any APU"


COUNTS = ((1,) * 12, (3,) * 12, (4,) * 12)


@pytest.mark.hostile
@pytest.mark.parametrize(
    "counts", [sum(one, ()) for one in itertools.permutations(COUNTS)] + [(1, 3, 4) * 12]
)
def test_nodes_are_filled_to_the_last_device_whatever_the_order_of_the_counts(counts):
    nodes = [node(i, 8) for i in range(12)]
    ordered = PlacementRequest(counts, GPU, node_order=lambda one: -int(one.node_id[1:]))
    told = PlacementRequest(counts, bundles=tuple((GPU,) * count for count in counts))
    for request in (ordered, told):
        plan = plan_cluster(nodes, request)
        assert plan.feasible and is_laid(request, nodes, plan.node_ids)


@pytest.mark.hostile
def test_logical_nodes_that_are_alike_lie_in_the_order_of_the_nodes_though_small_ones_are_filled_first():
    nodes = [node(0, 2), node(1, 1)]
    request = PlacementRequest((2, 2, 2), bundles=((GPU, {"CPU": 1.0}),) * 3)
    assert plan_cluster(nodes, request).node_ids == (("n0",) * 2, ("n0",) * 2, ("n1",) * 2)


def test_where_the_first_way_in_the_order_is_too_far_another_one_is_taken():
    """Small ones come first, and fill the first nodes in ways that leave no room for the large ones."""
    chance = random.Random(11)
    counts = sorted(chance.randint(1, 40) for _ in range(60))
    nodes = [node(i, sum(counts[i::10])) for i in range(10)]
    request = PlacementRequest(tuple(counts), GPU, node_order=lambda one: one.node_id)
    plan = plan_cluster(nodes, request)
    assert plan.feasible and is_laid(request, nodes, plan.node_ids)


@pytest.mark.parametrize("strategy", ["STRICT_PACK", "STRICT_SPREAD", "PACK", "SPREAD"])
def test_bundles_told_one_by_one_lie_as_if_told_once_where_all_are_alike(strategy):
    chance = random.Random(strategy)
    for _ in range(100):
        nodes = [node(i, chance.randint(1, 6)) for i in range(chance.randint(2, 5))]
        counts = tuple(chance.randint(0, 4) for _ in range(chance.randint(1, 5)))
        if any(counts):
            once = PlacementRequest(counts, GPU, strategy=strategy)
            told = PlacementRequest(
                counts,
                strategy=strategy,
                bundles=tuple((GPU,) * count for count in counts),
                node_selectors=({},) * len(counts),
            )
            assert plan_cluster(nodes, told).node_ids == plan_cluster(nodes, once).node_ids


@pytest.mark.hostile
@pytest.mark.parametrize("strategy", ["STRICT_PACK", "PACK", "SPREAD"])
def test_parts_of_devices_are_counted_per_device(strategy):
    def told(*shares):
        bundles = (tuple({"GPU": share} for share in shares),)
        return plan_cluster(
            [node(0, 2)], PlacementRequest((len(shares),), strategy=strategy, bundles=bundles)
        )

    assert told(0.6, 0.6).feasible and told(0.6, 0.4, 0.6, 0.4).feasible and told(0.5, 1.0, 0.5).feasible
    assert told(0.6, 0.6, 0.6).impossible and told(0.6, 0.6, 0.5).impossible
    assert told(1.0, 0.6, 0.6).impossible
    assert told(0.6, 1.0).feasible and told(2.0, 0.1).impossible and told(0.1).feasible
    assert told(0.5, 0.3, 0.2, 0.4, 0.3, 0.3).feasible, "it fits as it is told, and not the largest first"
    assert told(0.4, 0.4, 0.3, 0.3, 0.3, 0.3).feasible and told(0.3, 0.3, 0.4, 0.3, 0.4, 0.3).feasible
    chance, outcomes = random.Random(strategy), []
    for _ in range(200):
        shares = chance.choices([0.2, 0.3, 0.4, 0.5, 0.6, 1.0], k=chance.randint(3, 6))
        plan, fits = told(*shares), devices_hold(2, shares)
        assert (plan.feasible, plan.impossible) == (fits, not fits), shares
        outcomes.append(fits)
    assert min(outcomes.count(True), outcomes.count(False)) > 30
    alike = PlacementRequest((3,), {"GPU": 0.6}, strategy=strategy)
    assert plan_cluster([node(0, 2)], alike).impossible and plan_cluster([node(0, 3)], alike).feasible
    custom = PlacementRequest((3,), {"disk": 0.6}, strategy=strategy)
    assert plan_cluster([node(0, 2, disk=2.0)], custom).feasible, "Ray counts only devices one by one"


def test_pack_takes_few_nodes_where_bundles_differ():
    trainer, sandbox = {"GPU": 1.0}, {"GPU": 1.0, "CPU": 2.0}
    nodes = [node(0, 1), node(1, 2), node(2, 8), node(3, 1), node(4, 2)]
    request = PlacementRequest((10,), strategy="PACK", bundles=((trainer, sandbox) * 5,))
    assert set(plan_cluster(nodes, request).node_ids[0]) == {"n1", "n2"}
    few = PlacementRequest((2,), strategy="PACK", bundles=((trainer, sandbox),))
    assert plan_cluster(nodes, few).node_ids == (("n1", "n1"),), "the tightest that holds all of it"
