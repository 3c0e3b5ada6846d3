"""In which order Ray is asked for bundles: parts of devices that fit in one order need not fit in another.

Ray grants one placement group after the other, and in each one bundle after the other. Each part goes onto
the device that is as full as can be. So whatever fits does so in some order, as in that of its devices, the
fullest one first; but not in each: two parts of 0.4 go onto the first of two devices, and leave one place for
two parts of 0.6.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from raycrew.cluster_core._planning.devices import devices_in, laid
from raycrew.cluster_core._planning.request import Amounts, PlacementRequest, in_steps
from raycrew.cluster_core._planning.topology import RESOURCES_WITH_DEVICES, NodeState

T = TypeVar("T")
Devices = tuple[tuple[int, ...], ...]

_MOST_POINTS = 2000  # To look at for groups that share devices, besides one for each bundle.


@dataclass(frozen=True, slots=True)
class _Asked:
    """A bundle: its logical node, its position there, and how much it takes of which row of devices."""

    logical: int
    position: int
    shares: tuple[tuple[int, int], ...]


_Group = tuple[_Asked, ...]


def grant_order(
    nodes: Sequence[NodeState], placed: Sequence[Sequence[int]], request: PlacementRequest
) -> tuple[tuple[int, int], ...]:
    """All bundles, as (logical node, position there), in an order in which Ray grants them.

    Those of a logical node follow one another. Where any order does, there is none; those that share devices
    stand as in the request where that does, or where no other order was found.

    Args:
        nodes: The physical nodes, with what is free on them.
        placed: For each logical node, which of these takes each of its bundles.
        request: What was asked for.
    """
    divided = [
        name for name in sorted(RESOURCES_WITH_DEVICES) if any(one.get(name, 0) % 1 for one in request.kinds)
    ]
    if not divided or len(request.kinds) == 1:
        return ()
    devices = tuple(devices_in(in_steps(node.free.get(name, 0.0))) for node in nodes for name in divided)
    groups = [
        tuple(
            _Asked(logical, position, tuple(_shares(where, bundle, divided)))
            for position, (where, bundle) in enumerate(zip(whole, request.bundles_of(logical), strict=True))
        )
        for logical, whole in enumerate(placed)
        if whole
    ]
    return tuple(
        (asked.logical, asked.position)
        for sharing in _sharing(groups)
        for asked in _some_order(devices, sharing)
    )


def _shares(where: int, bundle: Amounts, divided: Sequence[str]) -> Iterator[tuple[int, int]]:
    for i, name in enumerate(divided):
        if bundle.get(name, 0) > 0:
            yield where * len(divided) + i, max(in_steps(bundle[name]), 1)


def _sharing(groups: Iterable[_Group]) -> list[list[_Group]]:
    """Groups, together with those that share devices with them."""
    holders: dict[int, list[_Group]] = {}
    for group in groups:
        rows = {row for asked in group for row, _ in asked.shares} or {-1 - group[0].logical}
        joined = [group]
        for others in _unlike((holders[row] for row in rows if row in holders), id):
            joined += others
            rows |= {row for one in others for asked in one for row, _ in asked.shares}
        holders |= dict.fromkeys(rows, sorted(joined, key=lambda one: one[0].logical))
    return _unlike(holders.values(), id)


def _some_order(devices: Devices, groups: Sequence[_Group]) -> _Group:
    """The bundles of groups as they stand where Ray grants them so, else in an order in which it does."""
    as_they_stand = tuple(asked for group in groups for asked in group)
    left: Devices | None = devices
    for asked in as_they_stand:
        left = _granted(left, asked) if left else None
    return as_they_stand if left else _searched(devices, groups) or as_they_stand


def _granted(devices: Devices, asked: _Asked) -> Devices | None:
    """What is left of devices when Ray has granted a bundle; None where it does not."""
    left = list(devices)
    for row, share in asked.shares:
        rest = laid(left[row], share)
        if rest is None:
            return None
        left[row] = rest
    return tuple(left)


@dataclass(frozen=True, slots=True)
class _Point:
    """What is left on the way: of devices, of the group that was begun, and of those that were not."""

    devices: Devices
    begun: _Group
    waiting: tuple[_Group, ...]

    @property
    def state(self) -> object:
        """What is the same for points that lead to the same."""
        return self.devices, _content(self.begun), tuple(sorted(map(_content, self.waiting)))

    def steps(self) -> Iterator[tuple[_Asked, "_Point"]]:
        """What may be asked for next, of bundles that are alike only one, and what is left then."""
        for group in [self.begun] if self.begun else _unlike(self.waiting, _content):
            waiting = tuple(one for one in self.waiting if one is not group)
            for asked in _unlike(group, lambda one: one.shares):
                devices = _granted(self.devices, asked)
                if devices is not None:
                    begun = tuple(one for one in group if one is not asked)
                    yield asked, _Point(devices, begun, waiting)


def _searched(devices: Devices, groups: Sequence[_Group]) -> _Group:
    """An order in which Ray grants all, the largest first where that does; none where it was not found."""
    largest_first = sorted(
        (tuple(sorted(one, key=_largest)) for one in groups), key=lambda one: _largest(one[0])
    )
    seen: set[object] = set()
    path: list[_Asked] = []
    trail = [_Point(devices, (), tuple(largest_first)).steps()]
    most = _MOST_POINTS + sum(map(len, groups))
    while trail and len(seen) < most:
        asked, point = next(trail[-1], (None, None))
        if asked is None or point is None:
            trail.pop()
            path = path[: len(trail) - 1]
        elif not point.begun and not point.waiting:
            return (*path, asked)
        elif point.state not in seen:
            seen.add(point.state)
            path.append(asked)
            trail.append(point.steps())
    return ()


def _largest(asked: _Asked) -> int:
    return -max((share for _, share in asked.shares), default=0)


def _content(group: _Group) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(sorted(asked.shares for asked in group))


def _unlike(items: Iterable[T], key: Callable[[T], object]) -> list[T]:
    """The first of those that have the same key."""
    found: dict[object, T] = {}
    for item in items:
        found.setdefault(key(item), item)
    return list(found.values())
