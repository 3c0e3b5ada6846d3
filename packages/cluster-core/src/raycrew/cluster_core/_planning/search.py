"""Laying bundles that differ, or that go in a given order: a search, part by part, over nodes.

A *part* goes onto one node as a whole: all bundles of a logical node where these stay together, else one
bundle. Amounts are whole numbers of Ray's steps, in one order of resources. The first way that is found is
the first one in the order of the parts and of the rooms, as far as the effort goes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from operator import add, ge, sub
from typing import Any, TypeVar

from raycrew.cluster_core._planning.bundle_packing import Effort
from raycrew.cluster_core._planning.devices import hold

T = TypeVar("T")

Vector = tuple[int, ...]

_TRACKED = 16  # Kinds of parts whose room is counted; the totals have to do for smaller ones.
_ROOMS_PER_STEP = 16


@dataclass(frozen=True, slots=True)
class Part:
    """What goes onto one node as a whole.

    Attributes:
        need: How much it takes.
        selector: Which selector its nodes fit; a position in `Room.fits`.
        logical: The logical node that it belongs to.
        segment: The segment that it belongs to, or None.
        shares: For each resource of which devices are divided, what each bundle takes.
    """

    need: Vector
    selector: int
    logical: int
    segment: int | None = None
    shares: tuple[Vector, ...] = ()


@dataclass(frozen=True, slots=True)
class Room:
    """What one physical node has to give.

    Attributes:
        free: How much.
        fits: Per selector, whether it takes what has that.
        domain: Its domain, or None.
        devices: For each resource of which devices are divided, how much of each device is free.
    """

    free: Vector
    fits: tuple[bool, ...]
    domain: str | None = None
    devices: tuple[Vector, ...] = ()


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
        self._first = dict.fromkeys(self._left, 0)  # No room before it takes one of that kind.
        self._chosen: list[int] = []
        self._taken: Counter[int] = Counter()  # Parts in each room.
        self._inside = _positions_by_domain(rooms)
        self._alike = {
            domain: tuple(sorted((rooms[i].free, rooms[i].fits) for i in inside))
            for domain, inside in self._inside.items()
        }
        self._divided = any(any(part.shares) for part in parts)
        self._shares: list[list[tuple[Vector, ...]]] = [[] for _ in rooms]
        self._rest, self._least, self._of_logical = _from_each_on(parts)
        self._segments = _sums((part.segment, part.need) for part in parts)
        self._domains = _sums((room.domain, room.free) for room in rooms)
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

    def _may_fit(self) -> bool:
        return all(self._capacity[kind] >= self._left[kind] for kind in self._tracked)

    def _rest_may_fit(self) -> bool:
        """Whether rooms that take any part that is left have as much as all of these need together."""
        depth, distinct = len(self._chosen), self._strategy == "DISTINCT"
        least, missing = self._least[depth], self._rest[depth]
        self._spend_on(len(self._rooms))
        for room, free in enumerate(self._free):
            if _covers(free, least) and not (distinct and self._taken[room]):
                missing = tuple(map(sub, missing, free))
                if max(missing) <= 0:
                    return True
        return max(missing) <= 0

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
            if not self._room(kind, free, facts.fits, taken=bool(self._taken[room])):
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
        rooms = self._open(depth, part)
        others = (room for room in rooms if not mine[room])
        if self._strategy == "PACK":
            yield from reversed(mine)
            left, rest = list(others), self._of_logical[depth]
            yield from (room for room in left if _covers(self._free[room], rest))
            yield from left if self._in_order else self._largest_first(depth, left)
        elif self._strategy in ("SPREAD", "STRICT_SPREAD"):
            yield from others
            if self._strategy == "SPREAD":
                yield from sorted(mine, key=lambda room: (mine[room], room))
        else:
            yield from rooms

    def _largest_first(self, depth: int, rooms: Sequence[int]) -> list[int]:
        """Rooms by how many parts of this logical node they take; of the same number as they stand."""
        logical = self._parts[depth].logical
        rest = list(takewhile(lambda part: part.logical == logical, islice(self._parts, depth, None)))
        takes = {free: _number_in(free, rest) for free in {self._free[room] for room in rooms}}
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
        return domain is not None and _covers(self._domains[domain], need)

    def _from_first(self, kind: tuple[Vector, int]) -> Iterator[int]:
        first, number = self._first[kind], len(self._rooms)
        while first < number and not self._room(
            kind, self._free[first], self._rooms[first].fits, taken=self._taken[first] > 0
        ):
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


def _covers(free: Vector, need: Vector) -> bool:
    return all(map(ge, free, need))


def _number_in(free: Vector, parts: Iterable[Part]) -> int:
    """How many of these parts so much takes, one after the other."""
    number = 0
    for part in parts:
        if _covers(free, part.need):
            free = tuple(map(sub, free, part.need))
            number += 1
    return number


def _from_each_on(parts: Sequence[Part]) -> tuple[list[Vector], list[Vector], list[Vector]]:
    """From each part on: what all need together, the least that any needs, what its logical node needs."""
    rest, least = [(0,) * len(parts[0].need)], [parts[-1].need]
    of_logical: list[Vector] = []
    logical: int | None = None
    for part in reversed(parts):
        rest.append(tuple(map(add, rest[-1], part.need)))
        least.append(tuple(map(min, least[-1], part.need)))
        of_logical.append(
            tuple(map(add, of_logical[-1], part.need)) if part.logical == logical else part.need
        )
        logical = part.logical
    return rest[::-1], least[::-1], of_logical[::-1]


def _sums(pairs: Iterable[tuple[T, Vector]]) -> dict[T, Vector]:
    sums: dict[T, Vector] = {}
    for key, amounts in pairs:
        before = sums.get(key, (0,) * len(amounts))
        sums[key] = tuple(map(add, before, amounts))
    return sums


def _positions_by_domain(rooms: Sequence[Room]) -> dict[str | None, list[int]]:
    found: dict[str | None, list[int]] = defaultdict(list)
    for position, room in enumerate(rooms):
        found[room.domain].append(position)
    return found
