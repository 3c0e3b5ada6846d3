"""The order in which bundles are asked for, beside what Ray does with that order."""

import random
import sys

import pytest

from raycrew.cluster_core._planning import PlacementRequest, granting, plan_cluster
from raycrew.cluster_core._planning.devices import laid
from raycrew.cluster_core._planning.granting import _Asked, _granted, _in_kinds, grant_order
from raycrew.cluster_core._planning.topology import NodeState


def node(i, devices):
    amounts = {"CPU": 64.0, "GPU": float(devices)}
    return NodeState(node_id=f"n{i}", address="a", total=amounts, free=amounts, labels={})


def told(*groups, strategy="STRICT_PACK", devices=(2,)):
    bundles = tuple(tuple({"GPU": share} if share else {"CPU": 1.0} for share in one) for one in groups)
    request = PlacementRequest(tuple(map(len, groups)), strategy=strategy, bundles=bundles)
    nodes = [node(i, number) for i, number in enumerate(devices)]
    return nodes, request, plan_cluster(nodes, request)


def as_they_stand(request):
    return [(logical, i) for logical, count in enumerate(request.bundle_counts) for i in range(count)]


def granted(nodes, request, plan, order):
    """Whether Ray grants bundles in an order: each part on the device that is as full as can be."""
    free = {one.node_id: [10] * int(one.free["GPU"]) for one in nodes}
    for logical, position in order:
        tenths = round(10 * request.bundles_of(logical)[position].get("GPU", 0))
        devices = free[plan.node_ids[logical][position]]
        for part in [10] * (tenths // 10) + [tenths % 10]:
            room = [left for left in devices if left >= part > 0]
            if part and not room:
                return False
            if part:
                devices[devices.index(min(room))] -= part
    return True


@pytest.mark.hostile
def test_what_fits_in_another_order_is_asked_for_in_that():
    for groups in (
        [(0.4, 0.4, 0.6, 0.6)],
        [(0.4, 0.4), (0.6, 0.6)],
        [(0.2, 1.0, 0.0, 0.3), (0.0,), (0.5, 0.2, 0.8)],
        [(0.3, 0.3, 0.4, 0.5, 0.5)],
    ):
        nodes, request, plan = told(*groups, devices=(3,) if len(groups) == 3 else (2,))
        assert plan.feasible
        assert granted(nodes, request, plan, plan.order), groups
        assert sorted(plan.order) == as_they_stand(request)
        whole = [logical for i, (logical, _) in enumerate(plan.order) if plan.order[i - 1][0] != logical]
        assert len(whole) <= len(groups), "the bundles of a group follow one another"


def test_what_ray_grants_as_it_stands_stays_so():
    for groups in [[(0.6, 0.4, 0.6, 0.4)], [(0.5, 1.0, 0.5)], [(0.0, 0.3), (0.2, 1.0)]]:
        _, request, plan = told(*groups)
        assert list(plan.order) == as_they_stand(request)
    for groups in [[(1.0, 2.0), (1.0,)], [(0.6, 0.6)]]:
        assert told(*groups, devices=(4,))[2].order == (), "any order does"


def test_a_group_that_takes_no_device_stands_by_itself_wherever_it_comes():
    groups = [(0.0,), (0.4, 0.4), (0.0, 0.0), (0.6, 0.6)]
    nodes, request, plan = told(*groups)
    assert granted(nodes, request, plan, plan.order) and sorted(plan.order) == as_they_stand(request)
    assert [one for one, _ in plan.order if one in (0, 2)] == [0, 2, 2]


def test_groups_on_other_nodes_keep_their_order():
    _, _, plan = told((1.0, 0.4), (0.4, 0.4, 0.6, 0.6), (0.3,), devices=(2, 2))
    assert plan.node_ids == (("n1", "n1"), ("n0",) * 4, ("n1",))
    orders = {logical: [i for one, i in plan.order if one == logical] for logical in range(3)}
    assert orders[0] == [0, 1] and orders[2] == [0] and orders[1] != [0, 1, 2, 3]
    assert [one for one, _ in plan.order if one != 1] == [0, 0, 2]


@pytest.mark.hostile
def test_nearly_all_that_is_planned_is_granted():
    """Where several groups share devices, no order of whole groups may do: then Ray is to say."""
    chance, planned, stood, asked = random.Random(5), 0, 0, 0
    while planned < 150:
        groups = [
            chance.choices([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0], k=chance.randint(2, 5)) for _ in range(2)
        ]
        nodes, request, plan = told(*groups, devices=(2, 2), strategy=chance.choice(["STRICT_PACK", "PACK"]))
        if plan.feasible:
            planned += 1
            stood += granted(nodes, request, plan, as_they_stand(request))
            is_granted = granted(nodes, request, plan, plan.order or as_they_stand(request))
            asked += is_granted
            assert is_granted == (plan.doubt == ""), "and it is known which not"
    assert stood < asked >= 149


NO_ORDER_FOR = [(0.4, 0.2, 0.6, 0.5), (0.7, 0.5, 0.2, 0.6)]


@pytest.mark.hostile
def test_a_plan_without_an_order_of_whole_groups_says_so():
    _, _, plan = told(*NO_ORDER_FOR, strategy="PACK", devices=(2, 2))
    assert plan.feasible and plan.order
    assert "Ray grants one logical node after the other, and in no such order" in plan.doubt
    assert told((0.4, 0.4, 0.6, 0.6))[2].doubt == ""


@pytest.mark.hostile
def test_the_search_for_an_order_ends_however_many_orders_there_are():
    def calls_for_pairs(number):
        """How many functions are called for pairs that fit in any order, beside two groups in none."""
        pairs = [(round(0.51 + i / 200, 3), round(0.49 - i / 200, 3)) for i in range(number)]
        nodes, _, plan = told(*NO_ORDER_FOR, strategy="PACK", devices=(2, 2))
        placed = [[int(node_id[1:]) for node_id in one] for one in plan.node_ids]
        placed += [[0, 2], *[[2, 2]] * number]
        groups = [*NO_ORDER_FOR, (0.1, 1.0), *pairs]
        bundles = tuple(tuple({"GPU": share} for share in one) for one in groups)
        request = PlacementRequest(tuple(map(len, groups)), strategy="PACK", bundles=bundles)
        found = []
        calls = calls_of(lambda: found.append(grant_order([*nodes, node(2, number + 1)], placed, request)))
        return calls, found[0].doubt

    few, _ = calls_for_pairs(12)
    many, doubt = calls_for_pairs(48)
    assert "not all orders of logical nodes were tried" in doubt
    assert many < 2 * few


def chain(number):
    """Nodes, and groups that share devices, each with the next; the first is granted in another order."""
    groups, placed = [(0.4, 0.4, 0.6, 0.6)], [[0] * 4]
    for i in range(number):
        groups.append((1.0, *(round(0.51 + (7 * i + j) % 40 / 100, 2) for j in range(7))))
        placed.append([i] + [i + 1] * 7)
    bundles = tuple(tuple({"GPU": share} for share in one) for one in groups)
    request = PlacementRequest(tuple(map(len, groups)), strategy="PACK", bundles=bundles)
    return [node(0, 3), *(node(i + 1, 8) for i in range(number))], placed, request


@pytest.mark.hostile
def test_a_search_that_always_gets_on_ends_too(monkeypatch):
    def searched(number):
        """How many bundles were laid by the search, and what is said of its end."""
        nodes, placed, request = chain(number)
        tried = []
        monkeypatch.setattr(granting, "_granted", lambda *asked: tried.append(asked) or _granted(*asked))
        return grant_order(nodes, placed, request).doubt, len(tried)

    assert searched(40)[0] == "", "with what it may take by itself"
    monkeypatch.setattr(granting, "_STEPS_AHEAD", 500, raising=False)
    few, many = searched(40), searched(160)
    assert few[0] == many[0] == granting.MAYBE_NO_ORDER
    assert many[1] < few[1] < 500


def test_what_is_largest_is_tried_first_and_of_groups_that_are_alike_only_one():
    asked = [(5000, 4900), (1000, 7000), (4900, 5000), (2000,), (7000, 1000)]
    groups = [
        tuple(_Asked(logical, position, ((0, share),)) for position, share in enumerate(shares))
        for logical, shares in enumerate(asked)
    ]
    found = _in_kinds([*groups, (_Asked(9, 0, ()),)])
    shares = [[share for bundle in one.group for _, share in bundle.shares] for one in found]
    assert shares == [[7000, 1000]] * 2 + [[5000, 4900]] * 2 + [[2000], []]
    assert [one.kind for one in found] == [0, 0, 1, 1, 2, 3]


def test_devices_take_shares_as_ray_lays_them():
    assert laid((10_000, 4000, 6000), 4000) == (10_000, 0, 6000)
    assert laid((10_000, 4000, 6000), 5000) == (10_000, 4000, 1000)
    assert laid((4000, 10_000, 10_000), 20_000) == (4000, 0, 0)
    assert laid((4000, 9000), 10_000) is None and laid((10_000,), 20_000) is None


def calls_of(what):
    """How many functions are called."""
    seen = 0

    def count(_frame, event, _what):
        nonlocal seen
        seen += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        what()
    finally:
        sys.setprofile(None)
    return seen


def calls_for(number):
    """How many functions are called to plan so many logical nodes that are all unlike."""
    bundles = tuple(({"GPU": 1.0, "CPU": 1 + i / number},) * 2 for i in range(number))
    request = PlacementRequest((2,) * number, strategy="PACK", bundles=bundles)
    nodes, plans = [node(i, 2) for i in range(number)], []
    calls = calls_of(lambda: plans.append(plan_cluster(nodes, request)))
    assert plans[0].feasible
    return calls


def test_many_unlike_logical_nodes_look_at_few_nodes_each():
    assert calls_for(400) < 2.5 * calls_for(200)
