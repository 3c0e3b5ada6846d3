"""Parts to be laid and rooms that take them, in numbers.

A *part* goes onto one node as a whole: all bundles of a logical node where these stay together, else one
bundle. Amounts are whole numbers of Ray's steps, in one order of resources.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add, ge, sub
from typing import TypeVar

T = TypeVar("T")

Vector = tuple[int, ...]


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


def covers(free: Vector, need: Vector) -> bool:
    """Whether what is free is at least what is needed, of everything."""
    return all(map(ge, free, need))


def number_in(free: Vector, parts: Iterable[Part]) -> int:
    """How many of these parts so much takes, one after the other."""
    number = 0
    for part in parts:
        if covers(free, part.need):
            free = tuple(map(sub, free, part.need))
            number += 1
    return number


def from_each_on(parts: Sequence[Part]) -> tuple[list[Vector], list[Vector], list[Vector]]:
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


def sums(pairs: Iterable[tuple[T, Vector]]) -> dict[T, Vector]:
    """All amounts of each key together."""
    found: dict[T, Vector] = {}
    for key, amounts in pairs:
        before = found.get(key, (0,) * len(amounts))
        found[key] = tuple(map(add, before, amounts))
    return found


def positions_by_domain(rooms: Sequence[Room]) -> dict[str | None, list[int]]:
    """Which rooms lie in each domain."""
    found: dict[str | None, list[int]] = defaultdict(list)
    for position, room in enumerate(rooms):
        found[room.domain].append(position)
    return found
