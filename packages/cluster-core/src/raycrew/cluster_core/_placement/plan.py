"""Which node takes which bundles: a pure function of what is free and what is asked for.

All bundles of a request are alike, so a node is one number here: how many bundles it has room for.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from raycrew.cluster_core._placement.bundle_packing import Effort, pack
from raycrew.cluster_core._placement.segments import lay_segments
from raycrew.cluster_core._topology import DOMAIN_LABEL, NodeState

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_SHOWN = 16  # Lines of explanation before the rest is only counted.
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"  # As Ray has it, for names and values.
_SELECTOR = re.compile(rf"(!?)(?:in\(({_LABEL}(?:, ?{_LABEL})*)\)|({_LABEL}))")
_LABEL_NAME = re.compile(rf"(?:{_LABEL}/)?{_LABEL}")


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a virtual cluster asks for.

    Attributes:
        bundle_counts: Bundles of each logical node; zeros leave holes.
        bundle: Resources of each bundle, in Ray's names and units.
        strategy: How the bundles of *one* logical node lie: STRICT_PACK on one physical node, PACK on few,
            SPREAD on many, STRICT_SPREAD each on another.
        label_selector: Labels that a physical node must have, in Ray's notation: `"a"`, `"!a"`, `"in(a,b)"`,
            `"!in(a,b)"`.
        segment_size: How many consecutive logical nodes (of those with bundles) share one domain, or None.
        domain_label: Which label of a node names its domain.
        distinct_nodes: Whether every logical node has a physical node of its own; only with STRICT_PACK.
    """

    bundle_counts: tuple[int, ...]
    bundle: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0, "GPU": 1.0})
    strategy: str = "STRICT_PACK"
    label_selector: Mapping[str, str] = field(default_factory=dict)
    segment_size: int | None = None
    domain_label: str = DOMAIN_LABEL
    distinct_nodes: bool = False

    def __post_init__(self) -> None:
        check_counts(self.bundle_counts)
        check_strategy(self.strategy)
        if not any(amount > 0 for amount in self.bundle.values()) or min(self.bundle.values()) < 0:
            raise ValueError(
                f"a bundle needs at least one positive amount and no negative one, not {dict(self.bundle)}"
            )
        if self.distinct_nodes and self.strategy != "STRICT_PACK":
            raise ValueError(f"distinct_nodes needs STRICT_PACK, not {self.strategy}")
        for label, wanted in self.label_selector.items():
            if not isinstance(label, str) or not _LABEL_NAME.fullmatch(label):
                raise ValueError(f"label selector {label!r}: that is not the name of a label")
            if not isinstance(wanted, str) or not _SELECTOR.fullmatch(wanted):
                raise ValueError(
                    f"label selector {label!r}: {wanted!r} is not one of 'a', '!a', 'in(a,b)', '!in(a,b)'"
                )
        filled = sum(count > 0 for count in self.bundle_counts)
        if self.segment_size is not None and (self.segment_size < 1 or filled % self.segment_size):
            raise ValueError(
                f"segment_size {self.segment_size} does not divide {filled}, the nodes with bundles"
            )

    @property
    def packing(self) -> str:
        """How to pack: the strategy, or DISTINCT."""
        return "DISTINCT" if self.distinct_nodes else self.strategy


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Where the bundles of a request go, or why they can't.

    Attributes:
        node_ids: Per logical node, the physical node of each of its bundles; empty without a plan.
        reasons: Why there is no plan, one line each; empty with one.
        impossible: Whether the request would not even fit if every node were empty; False where that was not
            found out, which of more than a few hundred logical nodes may happen.
    """

    node_ids: tuple[tuple[str, ...], ...] = ()
    reasons: tuple[str, ...] = ()
    impossible: bool = False

    @property
    def feasible(self) -> bool:
        """Whether the request fits into what is free."""
        return not self.reasons


def check_counts(counts: Sequence[int]) -> None:
    """Refuse lists of bundle counts that mean nothing.

    Raises:
        TypeError: An entry is not an integer.
        ValueError: An entry is negative, or there is no bundle at all.
    """
    for node, count in enumerate(counts):
        if isinstance(count, bool) or not isinstance(count, (int, Integral)):
            raise TypeError(
                f"bundle count {count!r} of node {node} is a {type(count).__name__}, not an integer"
            )
        if count < 0:
            raise ValueError(f"bundle count {count} of node {node} is below 0")
    if not any(counts):
        raise ValueError(f"the bundle counts {list(counts)} ask for no bundle at all")


def check_strategy(strategy: str) -> None:
    """Refuse strategies that Ray does not have.

    Raises:
        ValueError: The strategy is unknown.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"placement group strategy {strategy!r} is none of {', '.join(STRATEGIES)}")


def plan_cluster(
    nodes: Sequence[NodeState],
    request: PlacementRequest,
    holders: Mapping[str, Sequence[str]] | None = None,
) -> PlacementPlan:
    """Decide which node takes which bundles, or say why none can.

    Nodes that are already in use are filled first, so that whole nodes stay whole. Logical nodes of the same
    size lie in the order of `nodes`, so the same cluster gives the same plan again.

    Args:
        nodes: The physical nodes, in the order that people would list them.
        request: What is asked for.
        holders: Who holds the rest of a node, by node id; only shown in `reasons`.
    """
    rooms = [_room(node, node.free, request) for node in nodes]
    now, ever = Effort(), Effort()
    placed = _place(nodes, rooms, request, now)
    if placed is not None:
        return PlacementPlan(tuple(tuple(nodes[i].node_id for i in one) for one in placed))
    on_empty = _place(nodes, [_room(node, node.total, request) for node in nodes], request, ever)
    reasons = explain_request(nodes, request, holders or {})
    if now.gave_up or ever.gave_up:
        reasons += ("there may be a way that was not found: not all of them were tried",)
    return PlacementPlan(reasons=reasons, impossible=on_empty is None and not ever.gave_up)


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node with these labels is one that a selector in Ray's notation asks for."""
    return all(_matches(labels.get(label), wanted) for label, wanted in selector.items())


def _matches(value: str | None, wanted: str) -> bool:
    found = _SELECTOR.fullmatch(wanted)
    if found is None:
        return False
    negated, several, one = found.groups()
    values = [part.strip() for part in several.split(",")] if several else [one]
    return (value in values) != bool(negated)


def _room(node: NodeState, resources: Mapping[str, float], request: PlacementRequest) -> int:
    """How many bundles a node has room for."""
    if node.draining or (request.label_selector and not matches(node.labels, request.label_selector)):
        return 0
    # Ray counts in ten-thousandths; half a step covers what binary fractions lose.
    return min(
        int((resources.get(name, 0.0) + 5e-5) // need) for name, need in request.bundle.items() if need > 0
    )


def _place(
    nodes: Sequence[NodeState], rooms: Sequence[int], request: PlacementRequest, effort: Effort
) -> list[tuple[int, ...]] | None:
    filled = [i for i, count in enumerate(request.bundle_counts) if count]
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


def explain_request(
    nodes: Sequence[NodeState], request: PlacementRequest, holders: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Say what is needed, and per node what is free and who holds the rest, one line each."""
    rooms = [_room(node, node.free, request) for node in nodes]
    empty_rooms = [_room(node, node.total, request) for node in nodes]
    bundle = ", ".join(f"{amount:g} {name}" for name, amount in request.bundle.items())
    wanted = Counter(count for count in request.bundle_counts if count)
    shape = " + ".join(f"{number} x {count}" for count, number in sorted(wanted.items(), reverse=True))
    lines = [
        f"needed: {shape} bundles of {bundle}, {request.strategy} per node; "
        f"there is room for {sum(rooms)} of them, on empty nodes for {sum(empty_rooms)}"
    ]
    if request.segment_size is not None:
        with_label = {
            node.labels[request.domain_label] for node in nodes if request.domain_label in node.labels
        }
        lines.append(
            f"each {request.segment_size} consecutive nodes within one {request.domain_label}: "
            + (f"{len(with_label)} such domains" if with_label else "no node has that label")
        )
    lines += [
        _explain_node(node, rooms[i], empty_rooms[i], request, holders.get(node.node_id, ()))
        for i, node in enumerate(nodes[:_SHOWN])
    ]
    if len(nodes) > _SHOWN:
        rest = Counter(rooms[_SHOWN:])
        shown = ", ".join(f"{number} with room for {room}" for room, number in sorted(rest.items()))
        lines.append(f"and {len(nodes) - _SHOWN} more nodes: {shown}")
    return tuple(lines) if nodes else (*lines, "no node takes work")


def _explain_node(
    node: NodeState, room: int, empty_room: int, request: PlacementRequest, holders: Sequence[str]
) -> str:
    where = f"node {node.address} ({node.node_id[:8]})"
    if node.draining:
        return f"{where}: takes nothing new, as it is being drained"
    if request.label_selector and not matches(node.labels, request.label_selector):
        return f"{where}: its labels don't fit {dict(request.label_selector)}"
    amounts = ", ".join(
        f"{node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g} {name} free"
        for name in request.bundle
    )
    held = f"; held by {', '.join(holders)}" if holders else "; holder unknown" if room < empty_room else ""
    return f"{where}: room for {room} of {empty_room}: {amounts}{held}"
