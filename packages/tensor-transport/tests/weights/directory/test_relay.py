"""Trees of nodes: as deep as the plan says, and the best of them."""

import pytest

from raycrew.tensor_transport.weights._directory.relay import _levels, choose_fanout, relay_parent


def depth(nodes, place, fanout):
    """How many steps a bucket takes to a node, that to the first one included."""
    steps, node = 1, nodes[place]
    while (node := relay_parent(nodes, node, fanout)) is not None:
        steps += 1
    return steps


@pytest.mark.parametrize("fanout", [1, 2, 3, 5])
def test_a_tree_has_as_many_levels_as_its_last_node_is_deep(fanout):
    for count in range(1, 41):
        nodes = [f"n{i}" for i in range(count)]
        assert _levels(count, fanout) == depth(nodes, count - 1, fanout), count


def test_without_a_relay_nobody_has_a_parent():
    assert relay_parent(["a", "b"], "b", None) is None
    assert relay_parent(["a", "b"], "a", 1) is None


@pytest.mark.parametrize(
    ("nodes", "buckets"), [(2, 1), (2, 10), (3, 1), (4, 2), (9, 1), (9, 3), (30, 1), (30, 100)]
)
def test_the_fanout_is_the_one_with_which_the_last_bucket_is_there_earliest(nodes, buckets):
    names = [f"n{i}" for i in range(nodes)]
    steps = {f: f * (buckets - 1) + f * depth(names, nodes - 1, f) for f in range(1, nodes)}
    best = min(steps.values())
    chosen = choose_fanout(nodes, buckets)
    if chosen is None:
        assert best >= nodes * buckets, "a relay would have been quicker"
    else:
        assert steps[chosen] == best < nodes * buckets


def test_one_node_needs_no_relay():
    assert choose_fanout(1, 10) is None and choose_fanout(0, 10) is None
