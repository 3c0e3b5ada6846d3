"""Who fetches from whom between nodes: plans, no bytes."""

from collections.abc import Sequence


def relay_parent(nodes: Sequence[str], node: str, fanout: int | None) -> str | None:
    """The node that has to have a bucket before `node` fetches it; None for the publishers' own.

    Nodes are numbered in the order in which they came. With a fan-out of 1 they are a chain, of 2 a tree of
    two branches each; None lets each fetch from the publishers' nodes.
    """
    if fanout is None:
        return None
    place = list(nodes).index(node)
    return nodes[(place - 1) // fanout] if place else None


def choose_fanout(node_count: int, bucket_count: int) -> int | None:
    """The fan-out with which the last node has the last bucket earliest; None for no relay at all.

    A node sends one bucket at a time. A node with `f` children is busy for `f` steps with each bucket, and a
    bucket takes `f` steps per level of the tree: `f * (buckets - 1) + f * levels` steps, where without a
    relay the publishers' node sends everything, `buckets * nodes`.
    """
    if node_count <= 1:
        return None
    steps = {f: f * (bucket_count - 1 + _levels(node_count, f)) for f in range(1, node_count)}
    best = min(steps, key=lambda f: (steps[f], f), default=None)
    return None if best is None or steps[best] >= bucket_count * node_count else best


def _levels(node_count: int, fanout: int) -> int:
    """How deep a tree of so many nodes is."""
    levels = wide = held = 0
    while held < node_count:
        levels, wide = levels + 1, wide * fanout or 1
        held += wide
    return levels
