"""Laying segments, which are runs of logical nodes, into domains, which are sets of rooms.

Each segment lies within one domain. As in packing, a room is how many bundles a node can take and a count is
how many bundles a logical node has.
"""

from collections import defaultdict
from collections.abc import Sequence

from raycrew.cluster_core._planning.bundle_packing import MOST_SETS, Effort, pack

#: The domain of a segment, and for each of its counts the room of each bundle there.
Laid = tuple[int, list[tuple[int, ...]]]


def lay_segments(
    domains: Sequence[Sequence[int]], segments: Sequence[Sequence[int]], strategy: str, effort: Effort
) -> list[Laid] | None:
    """Lay segments into domains; where the quick way fails, by a search that is exact while effort lasts.

    Args:
        domains: The rooms of each domain.
        segments: The counts of each segment.
        strategy: How the bundles of each count lie.
        effort: What may be spent on the search; tells whether it was given up.
    """
    if sum(map(sum, segments)) > sum(map(sum, domains)):
        return None
    order = sorted(range(len(segments)), key=lambda n: -sum(segments[n]))
    quick = _tightest_first(domains, segments, strategy, order)
    return _Search(domains, segments, strategy, effort).run() if quick is None else quick


def _tightest_first(
    domains: Sequence[Sequence[int]], segments: Sequence[Sequence[int]], strategy: str, order: Sequence[int]
) -> list[Laid] | None:
    """Largest segment first, each into the tightest domain that takes it."""
    left = [list(rooms) for rooms in domains]
    sums = [sum(rooms) for rooms in left]
    found: dict[int, Laid] = {}
    hopeless: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for number in order:
        need, shape = sum(segments[number]), tuple(segments[number])
        for domain in sorted((d for d, room in enumerate(sums) if room >= need), key=lambda d: sums[d]):
            if domain in hopeless[shape]:
                continue
            inside = pack(left[domain], segments[number], strategy)
            if inside is None:
                hopeless[shape].add(domain)  # It only gets fuller.
                continue
            found[number] = domain, inside
            _fill(left[domain], inside, strategy)
            sums[domain] = sum(left[domain])
            break
        else:
            return None
    return [found[number] for number in range(len(segments))]


def _fill(rooms: list[int], inside: Sequence[tuple[int, ...]], strategy: str) -> None:
    for where in inside:
        for room in where:
            rooms[room] = 0 if strategy == "DISTINCT" else rooms[room] - 1


class _Search:
    """Depth-first over which domain takes which segment, remembering what failed.

    All segments of a domain are packed together, so that this misses nothing.
    """

    def __init__(
        self,
        domains: Sequence[Sequence[int]],
        segments: Sequence[Sequence[int]],
        strategy: str,
        effort: Effort,
    ) -> None:
        self._domains, self._segments, self._strategy, self._effort = domains, segments, strategy, effort
        self._order = sorted(range(len(segments)), key=lambda n: (-sum(segments[n]), sorted(segments[n])))
        self._taken: list[list[int]] = [[] for _ in domains]
        self._kinds = [tuple(sorted(rooms)) for rooms in domains]
        self._failed: set[tuple[object, ...]] = set()
        self._packed: list[list[tuple[int, ...]]] = [[] for _ in domains]

    def run(self) -> list[Laid] | None:
        if len(self._order) > MOST_SETS:  # Deeper than Python's stack.
            self._effort.gave_up = True
            return None
        if not self._fits(0):
            return None
        found: dict[int, Laid] = {}
        for domain, numbers in enumerate(self._taken):
            inside = iter(self._packed[domain])
            for number in numbers:
                found[number] = domain, [next(inside) for _ in self._segments[number]]
        return [found[number] for number in range(len(self._segments))]

    def _fits(self, depth: int) -> bool:
        if depth == len(self._order):
            return True
        if self._is_over():
            return False
        self._effort.spend((len(self._domains) + len(self._order)) // 4)
        states = [self._state(domain) for domain in range(len(self._domains))]
        seen = tuple(sorted(states))
        if seen in self._failed:
            return False
        alike = {state: domain for domain, state in reversed(list(enumerate(states)))}
        for domain in sorted(alike.values(), key=self._room):
            before = self._packed[domain]
            self._taken[domain].append(self._order[depth])
            if self._room(domain) >= 0 and (packed := self._pack(domain)) is not None:
                self._packed[domain] = packed
                if self._fits(depth + 1):
                    return True
            self._taken[domain].pop()
            self._packed[domain] = before
            if self._is_over():
                return False
        self._failed.add(seen)
        return False

    def _is_over(self) -> bool:
        return self._effort.gave_up

    def _state(self, domain: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._kinds[domain], tuple(sorted(self._counts(domain)))

    def _counts(self, domain: int) -> list[int]:
        return [count for number in self._taken[domain] for count in self._segments[number]]

    def _room(self, domain: int) -> int:
        return sum(self._domains[domain]) - sum(self._counts(domain))

    def _pack(self, domain: int) -> list[tuple[int, ...]] | None:
        rooms, counts = self._domains[domain], self._counts(domain)
        self._effort.spend(1 + (len(rooms) + len(counts)) // 4)
        return pack(rooms, counts, self._strategy, self._effort) if counts else []
