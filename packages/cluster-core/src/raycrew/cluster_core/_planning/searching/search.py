"""Laying bundles that differ, or that go in a given order: a search, part by part, over nodes.

The first way that is found is the first one in the order of the parts and of the rooms, as far as the effort
goes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, takewhile
from operator import add, sub
from typing import Any

from raycrew.cluster_core._planning.bundle_packing import Effort
from raycrew.cluster_core._planning.devices import hold
from raycrew.cluster_core._planning.searching.rooms import (
    Part,
    Room,
    Vector,
    covers,
    from_each_on,
    number_in,
    positions_by_domain,
    sums,
)

_TRACKED = 16  # Kinds of parts whose room is counted; the totals have to do for smaller ones.
_ROOMS_PER_STEP = 16


class Search:
    """Depth-first over which room takes which part, remembering what failed.

    Args:
        rooms: In the order in which they are to be taken.
        parts: In the order in which they are to be laid; those of a logical node follow one another, and so
            do those of a segment.
        strategy: How the parts of one logical node lie.
        effort: What may be spent once a way has led nowhere.
        in_order: Whether the order of the rooms is a wish; else PACK may take larger ones first.
    """

    def __init__(
        self,
        rooms: Sequence[Room],
        parts: Sequence[Part],
        strategy: str,
        effort: Effort,
        *,
        in_order: bool = True,
    ) -> None:
        self._rooms, self._parts, self._strategy, self._effort = rooms, parts, strategy, effort
        self._in_order = in_order
        self._free = [room.free for room in rooms]
        self._kinds = [(part.need, part.selector) for part in parts]
        self._left = Counter(self._kinds)
        self._first = dict.fromkeys(self._left, 0)  # No room before it takes one of that kind,
        self._open_from = 0  # or before this one any part.
        self._chosen: list[int] = []
        self._taken: Counter[int] = Counter()  # Parts in each room.
        self._inside = positions_by_domain(rooms)
        self._alike = {
            domain: tuple(sorted((rooms[i].free, rooms[i].fits) for i in inside))
            for domain, inside in self._inside.items()
        }
        self._divided = any(any(part.shares) for part in parts)
        self._shares: list[list[tuple[Vector, ...]]] = [[] for _ in rooms]
        self._rest, self._least, self._of_logical = from_each_on(parts)
        self._segments = sums((part.segment, part.need) for part in parts)
        self._domains = sums((room.domain, room.free) for room in rooms)
        self._tracked = sorted(self._left, reverse=True)[:_TRACKED]
        self._capacity: Counter[tuple[Vector, int]] = Counter()
        for (free, fits), number in Counter((room.free, room.fits) for room in rooms).items():
            for kind in self._tracked:
                self._capacity[kind] += number * self._room(kind, free, fits, taken=False)
        self._failed: set[object] = set()
        self._stuck = False
        self._looked = 0  # Rooms, since effort was spent on that.
        self._cost = 1 + len(self._left) // 8

    def run(self) -> list[int] | None:
        """The room of each part; None where there is no way, or none was found while the effort lasted."""
        if not self._may_fit() or not self._rest_may_fit():
            return None
        trail = [self._candidates(0)]
        while trail:
            if len(self._chosen) == len(trail):
                self._take_back()
            if self._effort.gave_up:
                return None
            room = next(trail[-1], None)
            if room is None:
                trail.pop()
                self._stuck = True
                self._effort.spend(self._cost + len(self._chosen) // 4)
                self._failed.add(self._state())
                continue
            self._put(room)
            if len(self._chosen) == len(self._parts):
                return self._chosen
            if self._leads_on():
                trail.append(self._candidates(len(self._chosen)))
            else:
                self._stuck = True
                self._effort.spend(self._cost)
        return None

    def _leads_on(self) -> bool:
        """Whether the parts that are left may fit, as far as sums and what has failed tell."""
        if not self._may_fit():
            return False
        return not self._stuck or (self._rest_may_fit() and self._state() not in self._failed)

    def _room(self, kind: tuple[Vector, int], free: Vector, fits: Sequence[bool], *, taken: bool) -> int:
        """How many parts of a kind a room takes, were there no others."""
        need, selector = kind
        if not fits[selector] or (taken and self._strategy == "DISTINCT"):
            return 0
        most = min(have // wanted for have, wanted in zip(free, need, strict=True) if wanted)
        return min(most, 1) if self._strategy == "DISTINCT" else most

    def _takes(self, kind: tuple[Vector, int], room: int) -> bool:
        """Whether a room takes a part of a kind."""
        need, selector = kind
        if not self._rooms[room].fits[selector] or (self._taken[room] and self._strategy == "DISTINCT"):
            return False
        return covers(self._free[room], need)

    def _may_fit(self) -> bool:
        return all(self._capacity[kind] >= self._left[kind] for kind in self._tracked)

    def _rest_may_fit(self) -> bool:
        """Whether rooms that take any part that is left have as much as all of these need together."""
        depth, distinct = len(self._chosen), self._strategy == "DISTINCT"
        least, missing = self._least[depth], self._rest[depth]
        self._spend_on(len(self._rooms))
        for room, free in enumerate(self._free):
            if covers(free, least) and not (distinct and self._taken[room]):
                missing = tuple(map(sub, missing, free))
                if max(missing) <= 0:
                    return True
        return False

    def _spend_on(self, rooms: int) -> None:
        """Note that so many rooms were looked at."""
        if self._stuck:
            self._effort.spend(rooms // _ROOMS_PER_STEP)

    def _holds(self, room: int, part: Part) -> bool:
        """Whether the devices of a room, one by one, hold a part with what is there."""
        held = [*self._shares[room], part.shares]
        return all(
            hold(devices, chain.from_iterable(one[i] for one in held))
            for i, devices in enumerate(self._rooms[room].devices)
        )

    def _candidates(self, depth: int) -> Iterator[int]:
        """The rooms that take a part, the preferred ones first; of those that are alike only one."""
        part, kind, seen = self._parts[depth], self._kinds[depth], set()
        mine = Counter(self._mine(depth))
        for room in self._preferred(depth, part, mine):
            free, facts = self._free[room], self._rooms[room]
            self._looked += 1
            if not self._takes(kind, room):
                continue
            shares = tuple(sorted(self._shares[room]))
            alike = (free, facts.fits, facts.domain, mine[room], self._taken[room] > 0, shares)
            if alike not in seen:
                seen.add(alike)
                if not self._divided or self._holds(room, part):
                    self._spend_on(self._looked)
                    self._looked = 0
                    yield room
        self._spend_on(self._looked)
        self._looked = 0

    def _preferred(self, depth: int, part: Part, mine: Counter[int]) -> Iterator[int]:
        if self._strategy == "PACK":
            yield from reversed(mine)
            rest = self._of_logical[depth]
            yield from (room for room in self._others(depth, part, mine) if covers(self._free[room], rest))
            left = self._others(depth, part, mine)
            yield from left if self._in_order else self._largest_first(depth, [*left])
        elif self._strategy in ("SPREAD", "STRICT_SPREAD"):
            yield from self._others(depth, part, mine)
            if self._strategy == "SPREAD":
                yield from sorted(mine, key=lambda room: (mine[room], room))
        else:
            yield from self._open(depth, part)

    def _others(self, depth: int, part: Part, mine: Counter[int]) -> Iterator[int]:
        """The rooms that take no part of the same logical node yet."""
        return (room for room in self._open(depth, part) if room not in mine)

    def _largest_first(self, depth: int, rooms: Sequence[int]) -> list[int]:
        """Rooms by how many parts of this logical node they take; of the same number as they stand."""
        logical = self._parts[depth].logical
        rest = list(takewhile(lambda part: part.logical == logical, islice(self._parts, depth, None)))
        takes = {free: number_in(free, rest) for free in {self._free[room] for room in rooms}}
        self._spend_on(len(takes) * len(rest))
        return sorted(rooms, key=lambda room: -takes[self._free[room]])

    def _open(self, depth: int, part: Part) -> Iterable[int]:
        """The rooms that a part may lie in as far as its segment goes."""
        if part.segment is None:
            return self._from_first(self._kinds[depth])
        if depth and self._parts[depth - 1].segment == part.segment:
            return self._inside[self._rooms[self._chosen[depth - 1]].domain]
        need = self._segments[part.segment]
        return (room for room in self._from_first(self._kinds[depth]) if self._has_space(room, need))

    def _has_space(self, room: int, need: Vector) -> bool:
        """Whether a room's domain has space for so much."""
        domain = self._rooms[room].domain
        return domain is not None and covers(self._domains[domain], need)

    def _from_first(self, kind: tuple[Vector, int]) -> Iterator[int]:
        number, least = len(self._rooms), self._least[0]
        while self._open_from < number and not covers(self._free[self._open_from], least):
            self._open_from += 1
        first = max(self._first[kind], self._open_from)
        while first < number and not self._takes(kind, first):
            first += 1
        self._first[kind] = first
        return iter(range(first, number))

    def _mine(self, depth: int) -> list[int]:
        """The rooms of the parts before this one that belong to the same logical node."""
        start = depth
        while start and self._parts[start - 1].logical == self._parts[depth].logical:
            start -= 1
        return self._chosen[start:depth]

    def _put(self, room: int) -> None:
        depth = len(self._chosen)
        need = self._parts[depth].need
        self._left[self._kinds[depth]] -= 1
        self._chosen.append(room)
        if self._divided:
            self._shares[room].append(self._parts[depth].shares)
        self._change(room, tuple(map(sub, self._free[room], need)), 1)

    def _take_back(self) -> None:
        room = self._chosen.pop()
        depth = len(self._chosen)
        need = self._parts[depth].need
        self._left[self._kinds[depth]] += 1
        if self._divided:
            self._shares[room].pop()
        self._change(
            room, tuple(have + given for have, given in zip(self._free[room], need, strict=True)), -1
        )
        self._first = {kind: min(first, room) for kind, first in self._first.items()}
        self._open_from = min(self._open_from, room)

    def _change(self, room: int, free: Vector, parts: int) -> None:
        """Let a room have so much, and so many parts more."""
        facts, before = self._rooms[room], self._free[room]
        was, now = self._taken[room] > 0, self._taken[room] + parts > 0
        for kind in self._tracked:
            self._capacity[kind] += self._room(kind, free, facts.fits, taken=now)
            self._capacity[kind] -= self._room(kind, before, facts.fits, taken=was)
        self._taken[room] += parts
        self._free[room] = free
        change = map(sub, free, before)
        self._domains[facts.domain] = tuple(map(add, self._domains[facts.domain], change))

    def _state(self) -> object:
        """What is left, where rooms that are alike count as the same; untouched ones are left out."""
        depth = len(self._chosen)
        mine, part, here = Counter(self._mine(depth)), self._parts[depth], None
        if depth and part.segment is not None and self._parts[depth - 1].segment == part.segment:
            here = self._rooms[self._chosen[-1]].domain
        touched: dict[str | None, list[Any]] = defaultdict(list)
        for room in set(self._chosen):
            facts = self._rooms[room]
            shares = tuple(sorted(self._shares[room]))
            touched[facts.domain].append((facts.free, facts.fits, self._free[room], mine[room], shares))
        domains = Counter(
            (self._alike[domain], domain == here, tuple(sorted(rooms))) for domain, rooms in touched.items()
        )
        return depth, frozenset(domains.items())
