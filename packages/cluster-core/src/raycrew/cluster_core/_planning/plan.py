"""Which node takes which bundles: a pure function of what is free and what is asked for.

Where all bundles of a request are alike, a node is one number here: how many bundles it has room for.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raycrew.cluster_core._planning.bundle_packing import Effort, pack
from raycrew.cluster_core._planning.explanation import explain_request
from raycrew.cluster_core._planning.granting import grant_order
from raycrew.cluster_core._planning.ordering import in_order
from raycrew.cluster_core._planning.request import Amounts, PlacementRequest, room_for, takes
from raycrew.cluster_core._planning.searching import lay_parts
from raycrew.cluster_core._planning.segments import lay_segments
from raycrew.cluster_core._planning.topology import NodeState


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Where the bundles of a request go, or why they can't.

    Attributes:
        node_ids: Per logical node, the physical node of each of its bundles; empty without a plan.
        reasons: Why there is no plan, one line each; empty with one.
        impossible: Whether the request would not even fit if every node were empty; False where that was not
            found out, which of more than a few hundred logical nodes may happen.
        order: The bundles, as (logical node, position there), in the order in which Ray grants them; empty
            where any order does.
        doubt: Why Ray may not grant a plan that fits, as far as is known; empty where nothing is.
    """

    node_ids: tuple[tuple[str, ...], ...] = ()
    reasons: tuple[str, ...] = ()
    impossible: bool = False
    order: tuple[tuple[int, int], ...] = ()
    doubt: str = ""

    @property
    def feasible(self) -> bool:
        """Whether the request fits into what is free."""
        return not self.reasons


def plan_cluster(
    nodes: Sequence[NodeState],
    request: PlacementRequest,
    holders: Mapping[str, Sequence[str]] | None = None,
) -> PlacementPlan:
    """Decide which node takes which bundles, or say why none can.

    Nodes that are already in use are filled first, so that whole nodes stay whole. Logical nodes of the same
    size lie in the order of `nodes`, so the same cluster gives the same plan again. With a `node_order` both
    give way to that: each logical node, or segment, takes the first nodes in it that leave room for the rest;
    only where finding these would take too long, others.

    Args:
        nodes: The physical nodes, in the order that people would list them, as `node_states()` gives them.
        request: What is asked for.
        holders: Who holds the rest of a node, by node id; only shown in `reasons`.

    Raises:
        TypeError: The request's `node_order` gives ranks that can't be compared.
        ValueError: It raised, or ranks none of the nodes.

    Examples:
        >>> has = {"GPU": 8.0, "CPU": 64.0}
        >>> nodes = [NodeState(f"node{i}", f"10.0.0.{i}", has, has) for i in range(3)]
        >>> plan_cluster(nodes, PlacementRequest((8, 4))).node_ids[0][0]
        'node0'
        >>> plan_cluster(nodes, PlacementRequest((16,))).feasible
        False
    """
    nodes = in_order(nodes, request.node_order)
    now, ever = Effort(), Effort()
    placed = _place(nodes, [node.free for node in nodes], request, now)
    if placed is not None:
        node_ids = tuple(tuple(nodes[i].node_id for i in one) for one in placed)
        order, doubt = grant_order(nodes, placed, request)
        return PlacementPlan(node_ids, order=order, doubt=doubt)
    in_any_order = replace(request, node_order=None)
    on_empty = _place(nodes, [node.total for node in nodes], in_any_order, ever)
    reasons = explain_request(nodes, request, holders or {})
    if now.gave_up or ever.gave_up:
        reasons += ("there may be a way that was not found: not all of them were tried",)
    return PlacementPlan(reasons=reasons, impossible=on_empty is None and not ever.gave_up)


def _place(
    nodes: Sequence[NodeState], amounts: Sequence[Amounts], request: PlacementRequest, effort: Effort
) -> list[tuple[int, ...]] | None:
    if not request.is_plain:
        return _place_parts(nodes, amounts, request, effort)
    filled = [i for i, count in enumerate(request.bundle_counts) if count]
    bundle, selector = request.kinds[0], request.selector_of(filled[0])
    rooms = [
        room_for(bundle, one) if takes(node, selector) else 0
        for node, one in zip(nodes, amounts, strict=True)
    ]
    counts = [int(request.bundle_counts[i]) for i in filled]
    if request.segment_size is None:
        found = pack(rooms, counts, request.packing, effort)
    else:
        found = _place_segments(nodes, rooms, counts, request, effort)
    if found is None:
        return None
    placed: list[tuple[int, ...]] = [()] * len(request.bundle_counts)
    for i, where in zip(filled, found, strict=True):
        placed[i] = where
    return placed


def _place_parts(
    nodes: Sequence[NodeState], amounts: Sequence[Amounts], request: PlacementRequest, effort: Effort
) -> list[tuple[int, ...]] | None:
    """The first way in the caller's order; where looking for that was given up, any way that is found."""
    found = lay_parts(nodes, amounts, request, effort)
    if found is not None or not effort.gave_up or request.node_order is None:
        return found
    return _place(nodes, amounts, replace(request, node_order=None), Effort())


def _place_segments(
    nodes: Sequence[NodeState],
    rooms: Sequence[int],
    counts: Sequence[int],
    request: PlacementRequest,
    effort: Effort,
) -> list[tuple[int, ...]] | None:
    """Lay each run of `segment_size` logical nodes into one domain."""
    domains: dict[str, list[int]] = defaultdict(list)
    for i, node in enumerate(nodes):
        if (name := node.labels.get(request.domain_label)) is not None and rooms[i]:
            domains[name].append(i)
    members, size = list(domains.values()), request.segment_size or 1
    segments = [counts[start : start + size] for start in range(0, len(counts), size)]
    laid = lay_segments([[rooms[i] for i in one] for one in members], segments, request.packing, effort)
    if laid is None:
        return None
    return [tuple(members[domain][room] for room in where) for domain, inside in laid for where in inside]
