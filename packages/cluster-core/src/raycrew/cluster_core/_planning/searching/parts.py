"""Requests whose bundles differ, or that have an order of nodes: as parts and rooms for the search."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from raycrew.cluster_core._planning.bundle_packing import Effort
from raycrew.cluster_core._planning.devices import devices_in
from raycrew.cluster_core._planning.request import Amounts, PlacementRequest, in_steps, takes
from raycrew.cluster_core._planning.searching.rooms import Part, Room, Vector
from raycrew.cluster_core._planning.searching.search import Search
from raycrew.cluster_core._planning.topology import RESOURCE_STEP, RESOURCES_WITH_DEVICES, NodeState


def lay_parts(
    nodes: Sequence[NodeState], amounts: Sequence[Amounts], request: PlacementRequest, effort: Effort
) -> list[tuple[int, ...]] | None:
    """The node of each bundle of each logical node, or None.

    Without an order of the caller's the largest come first, and nodes with little room.

    Args:
        nodes: The physical nodes, in the order in which they are taken.
        amounts: What each has to give.
        request: What is asked for.
        effort: What may be spent on the search; tells whether it was given up.
    """
    shape = _Shape(request)
    rooms = [shape.room(node, one) for node, one in zip(nodes, amounts, strict=True)]
    order, logical = list(range(len(rooms))), shape.logical
    if request.node_order is None:
        most = [max((room.free[i] for room in rooms), default=0) or 1 for i in range(len(shape.names))]
        order.sort(key=lambda i: _weight(rooms[i].free, most))
        logical = shape.largest_first(most)
    parts = [part for node in logical for part in shape.parts(node)]
    search = Search(
        [rooms[i] for i in order],
        [part for part, _ in parts],
        request.packing,
        effort,
        in_order=request.node_order is not None,
    )
    found = search.run()
    if found is None:
        return None
    where = {
        (part.logical, bundle): order[room]
        for (part, bundles), room in zip(parts, found, strict=True)
        for bundle in bundles
    }
    counts = enumerate(request.bundle_counts)
    answer = [tuple(where[node, bundle] for bundle in range(count)) for node, count in counts]
    return shape.in_node_order(answer) if request.node_order is None else answer


class _Shape:
    """A request in numbers: which resources count, which selectors there are, which segments."""

    def __init__(self, request: PlacementRequest) -> None:
        self._request = request
        self.names = sorted({name for kind in request.kinds for name, need in kind.items() if need > 0})
        self.logical = [node for node, count in enumerate(request.bundle_counts) if count]
        size = request.segment_size
        self._segment = {node: None if size is None else i // size for i, node in enumerate(self.logical)}
        selectors = {node: tuple(sorted(request.selector_of(node).items())) for node in self.logical}
        self._selectors = list(dict.fromkeys(selectors.values()))
        self._selector = {node: self._selectors.index(one) for node, one in selectors.items()}
        self._needs = {node: [self._need(one) for one in request.bundles_of(node)] for node in self.logical}
        self._divided = [
            i for i, name in enumerate(self.names) if name in RESOURCES_WITH_DEVICES and self._divides(i)
        ]

    def _divides(self, resource: int) -> bool:
        """Whether a bundle takes a part of a device."""
        return any(need[resource] % RESOURCE_STEP for node in self._needs.values() for need in node)

    def _need(self, bundle: Amounts) -> Vector:
        steps = self._steps(bundle)
        return tuple(
            step or int(bundle.get(name, 0) > 0) for name, step in zip(self.names, steps, strict=True)
        )

    def _steps(self, amounts: Amounts) -> Vector:
        return tuple(in_steps(amounts.get(name, 0.0)) for name in self.names)

    def room(self, node: NodeState, amounts: Amounts) -> Room:
        """A physical node that has so much to give."""
        fits = tuple(takes(node, dict(selector)) for selector in self._selectors)
        domain = None if self._request.segment_size is None else node.labels.get(self._request.domain_label)
        steps = self._steps(amounts)
        return Room(steps, fits, domain, tuple(devices_in(steps[i]) for i in self._divided))

    def parts(self, node: int) -> list[tuple[Part, tuple[int, ...]]]:
        """The parts of a logical node, and which of its bundles each is."""
        needs, selector, segment = self._needs[node], self._selector[node], self._segment[node]
        if self._request.strategy == "STRICT_PACK":
            whole = Part(_sum(needs), selector, node, segment, self._shares(needs))
            return [(whole, tuple(range(len(needs))))]
        order = list(range(len(needs)))
        if self._request.node_order is None:
            order.sort(key=lambda i: needs[i], reverse=True)
        return [(Part(needs[i], selector, node, segment, self._shares([needs[i]])), (i,)) for i in order]

    def _shares(self, needs: Sequence[Vector]) -> tuple[Vector, ...]:
        """What bundles take of each resource of which devices are divided."""
        return tuple(tuple(need[i] for need in needs if need[i]) for i in self._divided)

    def largest_first(self, most: Sequence[int]) -> list[int]:
        """The logical nodes, those of the largest segment first."""
        weight = {node: _weight(_sum(self._needs[node]), most) for node in self.logical}
        segments: dict[int | None, float] = defaultdict(float)
        for node in self.logical:
            segments[self._segment[node]] += weight[node]
        return sorted(
            self.logical,
            key=lambda node: (-segments[self._segment[node]], self._segment[node] or 0, -weight[node]),
        )

    def in_node_order(self, placed: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Exchange the nodes of what is alike, within a segment, so that they ascend."""
        alike: dict[object, list[int]] = defaultdict(list)
        for node in self.logical:
            alike[tuple(self._needs[node]), self._selector[node], self._segment[node]].append(node)
        ordered = list(placed)
        for members in alike.values():
            for node, where in zip(members, sorted(placed[one] for one in members), strict=True):
                ordered[node] = where
        return ordered


def _sum(needs: Iterable[Vector]) -> Vector:
    return tuple(map(sum, zip(*needs, strict=True)))


def _weight(amounts: Vector, most: Sequence[int]) -> float:
    return sum(amount / one for amount, one in zip(amounts, most, strict=True))
