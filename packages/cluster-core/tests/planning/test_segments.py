"""Segments in domains, compared with trying everything."""

import itertools
import random

import pytest

from raycrew.cluster_core import NodeState, PlacementRequest, plan_cluster
from raycrew.cluster_core._planning.bundle_packing import Effort
from raycrew.cluster_core._planning.segments import lay_segments

STRATEGIES = ["STRICT_PACK", "DISTINCT", "STRICT_SPREAD", "PACK", "SPREAD"]


def ways(count, n_rooms, strategy):
    """All ways to lay one set, as how many lie in each room."""
    if strategy in ("STRICT_PACK", "DISTINCT"):
        return [tuple(count * (room == here) for room in range(n_rooms)) for here in range(n_rooms)]
    most = 1 if strategy == "STRICT_SPREAD" else count
    return [way for way in itertools.product(range(most + 1), repeat=n_rooms) if sum(way) == count]


def fits_inside(rooms, counts, strategy):
    for choice in itertools.product(*(ways(count, len(rooms), strategy) for count in counts)):
        used = [sum(way[room] for way in choice) for room in range(len(rooms))]
        sets = [sum(way[room] > 0 for way in choice) for room in range(len(rooms))]
        if all(u <= r for u, r in zip(used, rooms, strict=True)) and (
            strategy != "DISTINCT" or max(sets, default=0) <= 1
        ):
            return True
    return False


def fits(domains, segments, strategy):
    for choice in itertools.product(range(len(domains)), repeat=len(segments)):
        if all(
            fits_inside(
                rooms, [c for s, d in zip(segments, choice, strict=True) if d == domain for c in s], strategy
            )
            for domain, rooms in enumerate(domains)
        ):
            return True
    return False


def check(domains, segments, strategy, laid):
    for (domain, inside), segment in zip(laid, segments, strict=True):
        assert [len(where) for where in inside] == list(segment)
        if strategy in ("STRICT_PACK", "DISTINCT"):
            assert all(len(set(where)) == 1 for where in inside)
        if strategy == "STRICT_SPREAD":
            assert all(len(set(where)) == len(where) for where in inside)
        assert 0 <= domain < len(domains)
    for domain, rooms in enumerate(domains):
        inside = [where for d, places in laid if d == domain for where in places]
        for room, size in enumerate(rooms):
            assert sum(where.count(room) for where in inside) <= size
            if strategy == "DISTINCT":
                assert sum(room in where for where in inside) <= 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_fits_is_found_and_nothing_else(strategy):
    chance, outcomes = random.Random(strategy), []
    for _ in range(400):
        rooms = chance.randint(1, 6)
        domains = [
            [chance.randint(1, rooms) for _ in range(chance.randint(1, 2))]
            for _ in range(chance.randint(1, 3))
        ]
        size = chance.randint(1, 2)
        segments = [
            [chance.randint(1, 4) for _ in range(size)]
            for _ in range(chance.randint(1, 4 if size == 1 else 2))
        ]
        effort = Effort()
        laid = lay_segments(domains, segments, strategy, effort)
        assert (laid is not None) == fits(domains, segments, strategy), (domains, segments)
        assert not effort.gave_up
        outcomes.append(laid is not None)
        if laid is not None:
            check(domains, segments, strategy, laid)
    assert min(outcomes.count(True), outcomes.count(False)) > 40


def nodes(*rooms):
    free = [{"CPU": float(room), "GPU": float(room)} for room in rooms]
    return [
        NodeState(f"{i:056x}", "10.0.0.1", amounts, amounts, {"domain": f"d{i}"})
        for i, amounts in enumerate(free)
    ]


def test_two_small_segments_share_the_smaller_domain():
    request = PlacementRequest((4, 4, 4, 5), segment_size=1, domain_label="domain", strategy="PACK")
    plan = plan_cluster(nodes(8, 9), request)
    assert plan.feasible
    small, large = nodes(8, 9)
    assert sorted(len({*where}) for where in plan.node_ids) == [1] * 4
    assert sum(where.count(small.node_id) for where in plan.node_ids) == 8
    assert {*plan.node_ids[3]} == {large.node_id}


@pytest.mark.parametrize("segment_size", [1, None])
def test_what_was_not_found_out_is_not_called_impossible(segment_size):
    """Numbers of which a few sums are just right: more ways than anybody would try."""
    chance = random.Random(7)
    counts = [chance.randint(500, 1500) for _ in range(60)]
    rooms = [sum(counts[start : start + 6]) for start in range(0, 60, 6)]
    rooms[0], rooms[1] = rooms[0] + 1, rooms[1] - 1
    chance.shuffle(counts)
    request = PlacementRequest(
        tuple(counts), segment_size=segment_size, domain_label="domain", strategy="STRICT_PACK"
    )
    plan = plan_cluster(nodes(*rooms), request)
    assert not plan.feasible and not plan.impossible
    assert "there may be a way that was not found" in plan.reasons[-1]


def test_more_logical_nodes_than_are_searched_are_not_called_impossible():
    counts = [3] * 400 + [2] * 200
    plan = plan_cluster(nodes(*[6] * 200, *[4] * 99, 2, 2), PlacementRequest(tuple(counts)))
    assert plan.feasible or not plan.impossible


def test_too_much_is_called_impossible():
    request = PlacementRequest((4, 4, 4, 5), segment_size=2, domain_label="domain")
    assert plan_cluster(nodes(8, 8), request).impossible
    assert plan_cluster(nodes(9, 7), request).impossible


def test_an_effort_that_is_spent_at_the_last_moment_still_gives_an_answer_or_none():
    for steps in range(60):
        effort = Effort(steps)
        found = lay_segments([[10, 9]], [[6], [5], [4], [4]], "STRICT_PACK", effort)
        assert found is not None or effort.gave_up


def test_more_segments_than_pythons_stack_is_deep_are_given_up():
    effort = Effort()
    assert lay_segments([[2] * 1000 + [1, 1]], [[2]] * 1001, "STRICT_PACK", effort) is None
    assert effort.gave_up
