"""Packing equal items that come in sets into rooms: where the bundles of logical nodes lie.

A room is how many bundles a node can take, a count is how many bundles a logical node has, and an answer
names the room of each bundle of each count, or is None when they don't fit.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence

_Answer = list[tuple[int, ...]]
_SEARCH_STEPS = 20_000
MOST_SETS = 500


class Effort:
    """What may be spent on searches that can take for ever, in steps.

    Attributes:
        gave_up: Whether it was not enough: then there may be an answer that was not found.
    """

    def __init__(self, steps: int = _SEARCH_STEPS) -> None:
        self._left = steps
        self.gave_up = False

    def spend(self, steps: int = 1) -> None:
        """Note that steps were made."""
        self._left -= steps
        self.gave_up |= self._left < 0


def pack(
    rooms: Sequence[int], counts: Sequence[int], strategy: str, effort: Effort | None = None
) -> _Answer | None:
    """Lay `counts` into `rooms`; sets of the same size lie in the order of the rooms.

    Args:
        rooms: What each room can take.
        counts: The sets.
        strategy: How the items of each set lie.
        effort: What may be spent where that is not found at once; None for nothing.
    """
    if sum(counts) > sum(rooms):
        return None
    if strategy == "STRICT_PACK":
        found = _strict_pack(rooms, counts, effort)
    else:
        found = _PACKERS[strategy](rooms, counts)
    return None if found is None else _in_room_order(found, counts)


def _in_room_order(found: _Answer, counts: Sequence[int]) -> _Answer:
    """Exchange answers of sets of the same size so that their first rooms ascend."""
    alike: dict[int, list[int]] = defaultdict(list)
    for position, count in enumerate(counts):
        alike[count].append(position)
    ordered: _Answer = [()] * len(counts)
    for positions in alike.values():
        for position, where in zip(
            positions, sorted(tuple(sorted(found[p])) for p in positions), strict=True
        ):
            ordered[position] = where
    return ordered


def _largest_first(counts: Sequence[int]) -> list[int]:
    return sorted(range(len(counts)), key=lambda i: -counts[i])


class _Sizes:
    """Rooms by how much is left of them; of rooms with the same size the first is taken first."""

    def __init__(self, rooms: Sequence[int]) -> None:
        self._by_size: dict[int, list[int]] = defaultdict(list)
        for i in range(len(rooms) - 1, -1, -1):
            self._by_size[rooms[i]].append(i)

    def tightest(self, count: int) -> int | None:
        """The smallest size that is at least `count`."""
        return min(
            (size for size, members in self._by_size.items() if size >= count and members), default=None
        )

    def largest(self) -> int:
        """The largest size."""
        return max(size for size, members in self._by_size.items() if members)

    def take(self, size: int, count: int) -> int:
        """Take `count` of a room of that size, and say which room it was."""
        room = self._by_size[size].pop()
        self._by_size[size - count].append(room)
        return room


def _strict_pack(rooms: Sequence[int], counts: Sequence[int], effort: Effort | None) -> _Answer | None:
    """Best fit, largest first; where that fails, a search that is exact while effort lasts."""
    sizes = _Sizes(rooms)
    found: _Answer = [()] * len(counts)
    for position in _largest_first(counts):
        size = sizes.tightest(counts[position])
        if size is None:
            return None if effort is None else _search(rooms, counts, effort)
        found[position] = (sizes.take(size, counts[position]),) * counts[position]
    return found


def _distinct(rooms: Sequence[int], counts: Sequence[int]) -> _Answer | None:
    """Each set into a room of its own; best fit, largest first, is exact."""
    sizes = _Sizes(rooms)
    found: _Answer = [()] * len(counts)
    for position in _largest_first(counts):
        size = sizes.tightest(counts[position])
        if size is None:
            return None
        found[position] = (sizes.take(size, size),) * counts[position]
    return found


def _pack(rooms: Sequence[int], counts: Sequence[int]) -> _Answer | None:
    """Each set into the tightest room that holds it whole; where none does, into as few as can be."""
    sizes = _Sizes(rooms)
    found: _Answer = [()] * len(counts)
    for position in _largest_first(counts):
        while (missing := counts[position] - len(found[position])) > 0:
            size = sizes.tightest(missing) or sizes.largest()
            part = min(missing, size)
            found[position] += (sizes.take(size, part),) * part
    return found


def _search(rooms: Sequence[int], counts: Sequence[int], effort: Effort) -> _Answer | None:
    """Depth-first search over the distinct sizes of rooms, remembering what failed."""
    order = _largest_first(counts)
    if max(counts) > max(rooms, default=0):
        return None
    left = list(rooms)
    chosen: list[int] = []
    failed: set[tuple[int, tuple[int, ...]]] = set()
    needed = [sum(counts[p] for p in order[depth:]) for depth in range(len(order) + 1)]

    def fits(depth: int) -> bool:
        if depth == len(order):
            return True
        smallest = counts[order[-1]]
        useful = tuple(sorted(size for size in left if size >= smallest))
        state = (depth, useful)
        if sum(useful) < needed[depth] or state in failed or effort.gave_up:
            return False
        count = counts[order[depth]]
        for size in sorted({size for size in left if size >= count}):
            room = left.index(size)
            left[room] -= count
            chosen.append(room)
            if fits(depth + 1):
                return True
            chosen.pop()
            left[room] += count
        failed.add(state)
        effort.spend()
        return False

    if len(order) > MOST_SETS:  # Deeper than Python's stack.
        effort.gave_up = True
        return None
    if not fits(0):
        return None
    found: _Answer = [()] * len(counts)
    for position, room in zip(order, chosen, strict=True):
        found[position] = (room,) * counts[position]
    return found


def _strict_spread(rooms: Sequence[int], counts: Sequence[int]) -> _Answer | None:
    """Each bundle of a set into another room."""
    return _spread(rooms, counts, strict=True)


def _spread(rooms: Sequence[int], counts: Sequence[int], *, strict: bool = False) -> _Answer | None:
    """Each set over as many rooms as it can; emptiest first is exact for distinct rooms (Gale-Ryser)."""
    heap = [(-room, i) for i, room in enumerate(rooms) if room]
    heapq.heapify(heap)
    found: _Answer = [()] * len(counts)
    for position in _largest_first(counts):
        while (missing := counts[position] - len(found[position])) > 0:
            if strict and missing > len(heap):
                return None
            taken = [heapq.heappop(heap) for _ in range(min(missing, len(heap)))]
            found[position] += tuple(i for _, i in taken)
            for room, i in taken:
                if room + 1:
                    heapq.heappush(heap, (room + 1, i))
    return found


_PACKERS: dict[str, Callable[[Sequence[int], Sequence[int]], _Answer | None]] = {
    "DISTINCT": _distinct,
    "PACK": _pack,
    "SPREAD": _spread,
    "STRICT_SPREAD": _strict_spread,
}
