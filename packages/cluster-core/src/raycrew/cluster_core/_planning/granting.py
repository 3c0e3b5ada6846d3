"""In which order Ray is asked for bundles: parts of devices that fit in one order need not fit in another.

Ray grants one placement group after the other, and in each one bundle after the other. Each part goes onto
the device that is as full as can be. So whatever fits does so in some order, as in that of its devices, the
fullest one first; but not in each: two parts of 0.4 go onto the first of two devices, and leave one place for
two parts of 0.6.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from raycrew.cluster_core._planning.bundle_packing import Effort
from raycrew.cluster_core._planning.devices import devices_in, laid
from raycrew.cluster_core._planning.request import Amounts, PlacementRequest, in_steps
from raycrew.cluster_core._planning.topology import RESOURCES_WITH_DEVICES, NodeState

T = TypeVar("T")
Devices = tuple[tuple[int, ...], ...]

_STEPS = 4_000
_STEPS_AHEAD = 200_000  # About a second: enough for 400 unlike logical nodes of 8 bundles in one row.
_AT_ONCE = 16  # What is looked at in one step of effort: groups, bundles and rows of devices.

NO_ORDER = (
    "Ray grants one logical node after the other, and in no such order do all parts of devices fit: ask for "
    "other parts, or fewer of them on a node"
)
MAYBE_NO_ORDER = (
    "in which order Ray grants all parts of devices was not found: not all orders of logical nodes were tried"
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A bundle: its logical node, its position there, and how much it takes of which row of devices."""

    logical: int
    position: int
    shares: tuple[tuple[int, int], ...]


_Group = tuple[_Asked, ...]


class _Effort(NamedTuple):
    """What may be spent on a search, on ways that have led nowhere and on steps ahead, each by itself."""

    nowhere: Effort
    ahead: Effort

    @property
    def gave_up(self) -> bool:
        """Whether either was not enough."""
        return self.nowhere.gave_up or self.ahead.gave_up


class GrantOrder(NamedTuple):
    """In which order Ray is asked for bundles.

    Attributes:
        bundles: All, as (logical node, position there); empty where any order does.
        doubt: Why Ray may not grant them so; empty where it does.
    """

    bundles: tuple[tuple[int, int], ...] = ()
    doubt: str = ""


def grant_order(
    nodes: Sequence[NodeState], placed: Sequence[Sequence[int]], request: PlacementRequest
) -> GrantOrder:
    """An order of all bundles in which Ray grants them, those of a logical node one after the other.

    Those that share devices stand as in the request where that does, or where no other order was found.

    Args:
        nodes: The physical nodes, with what is free on them.
        placed: For each logical node, which of these takes each of its bundles.
        request: What was asked for.
    """
    divided = [
        name for name in sorted(RESOURCES_WITH_DEVICES) if any(one.get(name, 0) % 1 for one in request.kinds)
    ]
    if not divided or len(request.kinds) == 1:
        return GrantOrder()
    devices = tuple(devices_in(in_steps(node.free.get(name, 0.0))) for node in nodes for name in divided)
    groups = [
        tuple(
            _Asked(logical, position, tuple(_shares(where, bundle, divided)))
            for position, (where, bundle) in enumerate(zip(whole, request.bundles_of(logical), strict=True))
        )
        for logical, whole in enumerate(placed)
        if whole
    ]
    effort = _Effort(Effort(_STEPS), Effort(_STEPS_AHEAD))
    found = [_some_order(devices, sharing, effort) for sharing in _sharing(groups)]
    bundles = tuple((asked.logical, asked.position) for order, _ in found for asked in order)
    return GrantOrder(bundles, next((doubt for _, doubt in found if doubt), ""))


def _shares(where: int, bundle: Amounts, divided: Sequence[str]) -> Iterator[tuple[int, int]]:
    for i, name in enumerate(divided):
        if bundle.get(name, 0) > 0:
            yield where * len(divided) + i, max(in_steps(bundle[name]), 1)


def _sharing(groups: Iterable[_Group]) -> list[list[_Group]]:
    """Groups, together with those that share devices with them."""
    holders: dict[int | None, list[_Group]] = {}
    for group in groups:
        rows: set[int | None] = {row for asked in group for row, _ in asked.shares} or {None}
        joined = [group]
        for others in _unlike((holders[row] for row in rows if row in holders), id):
            joined += others
            rows |= {row for one in others for asked in one for row, _ in asked.shares}
        holders |= dict.fromkeys(rows, sorted(joined, key=lambda one: one[0].logical))
    return _unlike(holders.values(), id)


def _some_order(devices: Devices, groups: Sequence[_Group], effort: _Effort) -> tuple[_Group, str]:
    """The bundles of groups as they stand where Ray grants them so, else in an order in which it does.

    With it why Ray may not grant them so, if that is not known.
    """
    rows = sorted({row for group in groups for asked in group for row, _ in asked.shares})
    theirs, known = tuple(devices[row] for row in rows), {row: i for i, row in enumerate(rows)}
    as_they_stand = tuple(_on_rows(asked, known) for group in groups for asked in group)
    left: Devices | None = theirs
    for asked in as_they_stand:
        left = None if left is None else _granted(left, asked)
    if left is not None:
        return as_they_stand, ""
    found = _searched(theirs, [tuple(_on_rows(asked, known) for asked in group) for group in groups], effort)
    if found:
        return found, ""
    return as_they_stand, MAYBE_NO_ORDER if effort.gave_up else NO_ORDER


def _on_rows(asked: _Asked, known: Mapping[int, int]) -> _Asked:
    """A bundle, by the numbers of some rows among themselves."""
    return replace(asked, shares=tuple((known[row], share) for row, share in asked.shares))


def _granted(devices: Devices, asked: _Asked) -> Devices | None:
    """What is left of devices when Ray has granted a bundle; None where it does not."""
    left = list(devices)
    for row, share in asked.shares:
        rest = laid(left[row], share)
        if rest is None:
            return None
        left[row] = rest
    return tuple(left)


class _Waiting(NamedTuple):
    """A group that is not begun yet; those that are alike are of one kind, and stand beside one another."""

    kind: int
    group: _Group


@dataclass(frozen=True, slots=True)
class _Point:
    """What is left on the way: of devices, of the group that was begun, and of those that were not."""

    devices: Devices
    begun: _Group
    waiting: tuple[_Waiting, ...]

    @property
    def state(self) -> object:
        """What is the same for points that lead to the same."""
        return self.devices, _content(self.begun), tuple(one.kind for one in self.waiting)

    @property
    def cost(self) -> int:
        """Steps of effort for a look at what may come next."""
        return 1 + (len(self.devices) + len(self.begun) + len(self.waiting)) // _AT_ONCE

    def steps(self) -> Iterator[tuple[_Asked, "_Point"]]:
        """What may be asked for next, of bundles that are alike only one, and what is left then."""
        if self.begun:
            yield from self._steps_in(self.begun, self.waiting)
            return
        for chosen in _unlike(self.waiting, lambda one: one.kind):
            waiting = tuple(one for one in self.waiting if one is not chosen)
            yield from self._steps_in(chosen.group, waiting)

    def _steps_in(self, group: _Group, waiting: tuple[_Waiting, ...]) -> Iterator[tuple[_Asked, "_Point"]]:
        for asked in _unlike(group, lambda one: one.shares):
            devices = _granted(self.devices, asked)
            if devices is not None:
                begun = tuple(one for one in group if one is not asked)
                yield asked, _Point(devices, begun, waiting)


def _searched(devices: Devices, groups: Sequence[_Group], effort: _Effort) -> _Group:
    """An order in which Ray grants all, the largest first where that does; none where it was not found.

    Args:
        devices: What is free.
        groups: What is asked for.
        effort: Spent on each step, whether it led somewhere or not.
    """
    start = _Point(devices, (), _in_kinds(groups))
    seen: set[object] = set()
    path: list[_Asked] = []
    trail = [(start, start.steps())]
    while trail and not effort.gave_up:
        at, steps = trail[-1]
        asked, point = next(steps, (None, None))
        if asked is None or point is None:
            effort.nowhere.spend(at.cost)
            trail.pop()
            path = path[: len(trail) - 1]
        elif not point.begun and not point.waiting:
            return (*path, asked)
        elif (state := point.state) in seen:
            effort.nowhere.spend(at.cost)
        else:
            effort.ahead.spend(at.cost)
            seen.add(state)
            path.append(asked)
            trail.append((point, point.steps()))
    return ()


def _in_kinds(groups: Sequence[_Group]) -> tuple[_Waiting, ...]:
    """Groups, those with the largest bundle first, each with its largest first."""
    numbers: dict[object, int] = {}
    sorted_groups = sorted(
        (tuple(sorted(one, key=_largest)) for one in groups),
        key=lambda one: (_largest(one[0]), _content(one)),
    )
    return tuple(_Waiting(numbers.setdefault(_content(one), len(numbers)), one) for one in sorted_groups)


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
