"""What was given back a moment ago: counted as free only where nodes show it, and waited for only a while."""

import pytest

from raycrew.cluster_core import Bundle, NodeState
from raycrew.cluster_core._placement.returning import Returning

pytestmark = [pytest.mark.smoke, pytest.mark.hostile]


def node(node_id, free, total=4.0):
    return NodeState(node_id, "10.0.0.1", {"GPU": total}, {"GPU": free})


def bundles(node_id, count):
    return [Bundle(i, 0, node_id, "10.0.0.1", {"GPU": 1.0}) for i in range(count)]


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def returning(now):
    return Returning(lambda: now[0])


def test_it_is_settled_once_each_node_showed_it_as_free(returning):
    assert returning.settled([node("a", 0.0)])
    returning.note([node("a", 1.0), node("b", 2.0)], [*bundles("a", 2), *bundles("b", 2)])
    assert not returning.settled([node("a", 1.0), node("b", 4.0)])
    assert not returning.settled([node("a", 2.0), node("b", 0.0)])  # Somebody else was quick on b.
    assert returning.settled([node("a", 3.0), node("b", 0.0)])
    assert returning.settled([node("a", 0.0), node("b", 0.0)])


def test_two_clusters_that_end_one_after_the_other_are_added_up(returning):
    returning.note([node("a", 0.0)], bundles("a", 2))
    returning.note([node("a", 0.0)], bundles("a", 2))
    assert not returning.settled([node("a", 2.0)])
    assert returning.settled([node("a", 4.0)])


def test_what_does_not_come_is_not_waited_for_long(returning, now):
    returning.note([node("a", 0.0)], bundles("a", 2))
    for now[0] in (1.9, 2.0):
        assert not returning.settled([node("a", 0.0)])
    now[0] = 2.1
    assert returning.settled([node("a", 0.0)])


def test_nodes_that_are_gone_are_not_waited_for(returning):
    returning.note([node("a", 2.0)], [*bundles("a", 2), *bundles("lost", 2)])
    assert returning.settled([node("a", 4.0)])
    returning.note([node("a", 2.0)], bundles("a", 2))
    assert returning.settled([])


def test_more_than_a_node_has_is_not_waited_for(returning):
    returning.note([node("a", 3.0)], bundles("a", 2))
    assert returning.settled([node("a", 4.0)])
    unknown = Bundle(0, 0, "a", "10.0.0.1", {"NPU": 1.0})
    returning.note([node("a", 4.0)], [unknown])
    assert returning.settled([node("a", 4.0)])


def test_the_smallest_share_counts_and_what_binary_fractions_lose_does_not(returning):
    returning.note([node("a", 0.0)], bundles("a", 2))
    assert not returning.settled([node("a", 1.9999)])
    assert returning.settled([node("a", 1.99999)])


def test_what_a_node_does_not_tell_of_is_not_free(returning):
    returning.note([node("a", 2.0)], bundles("a", 1))
    assert not returning.settled([NodeState("a", "10.0.0.1", {"GPU": 4.0}, {})])
    returning.note([NodeState("b", "10.0.0.1", {"GPU": 1.0}, {})], bundles("b", 1))
    assert not returning.settled([node("a", 3.0), NodeState("b", "10.0.0.1", {"GPU": 1.0}, {})])
    assert returning.settled([node("a", 3.0), node("b", 1.0)])
