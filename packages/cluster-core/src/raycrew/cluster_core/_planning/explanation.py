"""Why a request does not fit: what is needed, what is free where, and what would do."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from raycrew.cluster_core._planning.bundle_packing import Effort, pack
from raycrew.cluster_core._planning.request import Amounts, PlacementRequest, room_for, takes
from raycrew.cluster_core._planning.topology import NodeState

_SHOWN = 16  # Lines of explanation before the rest is only counted.


def explain_request(
    nodes: Sequence[NodeState], request: PlacementRequest, holders: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Say what is needed, and per node what is free and who holds the rest, one line each."""
    lines = [_needed(nodes, request), *_segments(nodes, request)]
    lines += [*_nowhere(nodes, request), *_what_would_fit(nodes, request)]
    lines += [_explain_node(node, request, holders.get(node.node_id, ())) for node in nodes[:_SHOWN]]
    if len(nodes) > _SHOWN:
        rest = Counter(_rooms(node, node.free, request) for node in nodes[_SHOWN:])
        shown = ", ".join(f"{number} with room for {_each(room)}" for room, number in sorted(rest.items()))
        lines.append(f"and {len(nodes) - _SHOWN} more nodes: {shown}")
    return tuple(lines) if nodes else (*lines, "no node takes work")


def _rooms(node: NodeState, amounts: Amounts, request: PlacementRequest) -> tuple[int, ...]:
    """How many bundles of each kind a node has room for, were there no others."""
    selectors = {tuple(request.selector_of(i).items()) for i, n in enumerate(request.bundle_counts) if n}
    if not any(takes(node, dict(selector)) for selector in selectors):
        return (0,) * len(request.kinds)
    return tuple(room_for(kind, amounts) for kind in request.kinds)


def _needed(nodes: Sequence[NodeState], request: PlacementRequest) -> str:
    free = _sum([_rooms(node, node.free, request) for node in nodes], request)
    empty = _sum([_rooms(node, node.total, request) for node in nodes], request)
    if request.bundles is None:
        wanted = Counter(count for count in request.bundle_counts if count)
        shape = " + ".join(f"{number} x {count}" for count, number in sorted(wanted.items(), reverse=True))
        shape += f" bundles of {_amounts(request.bundle)}"
    else:
        logical = Counter(_bundles(one) for one in request.bundles if one)
        shape = " + ".join(f"{number} x [{bundles}]" for bundles, number in logical.items())
    them = "them" if request.bundles is None else "each kind alone"
    return (
        f"needed: {shape}, {request.strategy} per node; "
        f"there is room for {_each(free)} of {them}, on empty nodes for {_each(empty)}"
    )


def _sum(rooms: Sequence[tuple[int, ...]], request: PlacementRequest) -> tuple[int, ...]:
    return tuple(sum(one[kind] for one in rooms) for kind in range(len(request.kinds)))


def _segments(nodes: Sequence[NodeState], request: PlacementRequest) -> Iterable[str]:
    if request.segment_size is None:
        return
    label = request.domain_label
    domains = {node.labels[label] for node in nodes if label in node.labels}
    found = f"{len(domains)} such domains" if domains else "no node has that label"
    yield f"each {request.segment_size} consecutive nodes within one {label}: {found}"


def _nowhere(nodes: Sequence[NodeState], request: PlacementRequest) -> Iterable[str]:
    """Which resources no node has any of."""
    none = "RayVirtualCluster(use_gpus=False)" if request.bundles is None else "BundleSpec(gpus=0)"
    for name in sorted({name for kind in request.kinds for name, need in kind.items() if need > 0}):
        if nodes and not any(node.total.get(name, 0.0) > 0 for node in nodes):
            advice = f"; {none} asks for none" if name == "GPU" else ""
            yield f"no node has any {name}{advice}"


def _what_would_fit(nodes: Sequence[NodeState], request: PlacementRequest) -> Iterable[str]:
    """Where bundles are to stay together on a node and none is that large, say what would fit."""
    if request.packing != "STRICT_PACK" or request.segment_size is not None or not request.is_plain:
        return
    rooms = [_rooms(node, node.total, request)[0] for node in nodes]
    largest, counts = max(rooms, default=0), [count for count in request.bundle_counts if count]
    if not 0 < largest < max(counts):
        return
    parts = [part for count in counts for part in split_evenly(count, largest)]
    fits = pack(rooms, counts, "PACK") is not None
    ways = ["placement_group_strategy='PACK'"] if fits else []
    if pack(rooms, parts, "STRICT_PACK", Effort()) is not None:
        ways.insert(0, f"{_shape(parts)} logical nodes" if len(parts) > 8 else f"the counts {parts}")
    if ways:
        yield (
            f"STRICT_PACK keeps the {max(counts)} bundles of a logical node on one physical node, and the "
            f"largest holds {largest}; {' or '.join(ways)} would fit on empty nodes"
        )


def split_evenly(count: int, most: int) -> list[int]:
    """A count in as few parts as can be, of sizes as like one another as can be."""
    number = -(-count // most)
    return [count // number + (i < count % number) for i in range(number)]


def _shape(counts: Sequence[int]) -> str:
    return " + ".join(f"{len(list(same))} x {count}" for count, same in groupby(sorted(counts, reverse=True)))


def _explain_node(node: NodeState, request: PlacementRequest, holders: Sequence[str]) -> str:
    where = f"node {node.address} ({node.node_id[:8]})"
    if node.draining:
        return f"{where}: takes nothing new, as it is being drained"
    selectors = [request.selector_of(i) for i, count in enumerate(request.bundle_counts) if count]
    if not any(takes(node, selector) for selector in selectors):
        return f"{where}: its labels don't fit {selectors[0]}"
    room, empty_room = (_rooms(node, amounts, request) for amounts in (node.free, node.total))
    names = dict.fromkeys(name for kind in request.kinds for name in kind)
    amounts = ", ".join(
        f"{node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g} {name} free" for name in names
    )
    held = f"; held by {', '.join(holders)}" if holders else "; holder unknown" if room != empty_room else ""
    return f"{where}: room for {_each(room)} of {_each(empty_room)}: {amounts}{held}"


def _each(numbers: Sequence[int]) -> str:
    """One number per kind of bundle."""
    return " / ".join(map(str, numbers))


def _bundles(bundles: Sequence[Amounts]) -> str:
    return " + ".join(f"{len(list(same))} x ({_amounts(one)})" for one, same in groupby(map(dict, bundles)))


def _amounts(amounts: Amounts) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())
