"""The order in which physical nodes are taken, where a caller gives one."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from raycrew.cluster_core._planning.topology import NodeState

#: A rank for each node, by node id, or a function that gives something to sort by; None for no order.
NodeOrder = Mapping[str, float] | Callable[[NodeState], Any] | None


def check_node_order(order: NodeOrder) -> None:
    """Refuse what is no order, before any node is known.

    Raises:
        TypeError: It is neither a mapping of numbers nor a function.
        ValueError: A rank is not a number that others can be compared with.
    """
    if order is None or callable(order):
        return
    if not isinstance(order, Mapping):
        raise TypeError(
            f"node_order is a mapping of node ids to ranks or a function of a NodeState, not {order!r}; "
            "of a list of node ids, {node_id: rank for rank, node_id in enumerate(ids)}"
        )
    for node_id, rank in order.items():
        if not isinstance(node_id, str):
            raise TypeError(f"node_order: {node_id!r} is not a node id")
        if isinstance(rank, bool) or not isinstance(rank, (int, float, Real)):
            raise TypeError(f"node_order: the rank {rank!r} of node {node_id} is not a number")
        _check_comparable(rank, node_id)


def in_order(nodes: Sequence[NodeState], order: NodeOrder) -> list[NodeState]:
    """Nodes in the order that a caller gives; of the same rank, and without one, as they stand.

    Raises:
        TypeError: What the function gives for two nodes can't be compared.
        ValueError: The function raised, or there is none among the nodes that the mapping ranks.
    """
    if order is None:
        return list(nodes)
    if isinstance(order, Mapping):
        if nodes and not any(node.node_id in order for node in nodes):
            raise ValueError(
                f"node_order ranks {len(order)} node ids, of which none is a node of this cluster; "
                f"one of those is {nodes[0].node_id!r}"
            )
        keys: list[Any] = [order.get(node.node_id) for node in nodes]
    else:
        keys = [_key(order, node) for node in nodes]
    ranked = [position for position, key in enumerate(keys) if key is not None]
    try:
        ranked.sort(key=lambda position: keys[position])
    except (TypeError, ValueError) as error:
        raise TypeError(f"node_order gives ranks that can't be compared: {error}") from error
    rest = [position for position, key in enumerate(keys) if key is None]
    return [nodes[position] for position in (*ranked, *rest)]


def _key(order: Callable[[NodeState], Any], node: NodeState) -> Any:
    try:
        key = order(node)
    except Exception as error:
        raise ValueError(
            f"node_order raised {type(error).__name__} for node {node.address} ({node.node_id[:8]}): {error}"
        ) from error
    _check_comparable(key, node.node_id)
    return key


def _check_comparable(key: Any, node_id: str) -> None:
    """Refuse what Python would sort without an error, but in no order."""
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, Real) and part != part:
            raise ValueError(f"node_order: the rank {key!r} of node {node_id} is not a number")
        if isinstance(part, (set, frozenset)):
            raise TypeError(f"node_order: the rank {key!r} of node {node_id} is a set, which has no order")
