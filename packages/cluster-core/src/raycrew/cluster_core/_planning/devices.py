"""Devices that Ray counts one by one: what fits into their sum need not fit into any of them."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from raycrew.cluster_core._planning.topology import RESOURCE_STEP

_MOST_WAYS = 300  # To lay shares, that are followed at the same time.


def devices_in(steps: int) -> tuple[int, ...]:
    """Devices that have so much free together: whole ones, and one with the rest.

    Ray tells the sum alone. That it fills a device before it begins another one is how it lays shares that
    come one after the other; what ended meanwhile may have left other rests.
    """
    whole, rest = divmod(steps, RESOURCE_STEP)
    return (RESOURCE_STEP,) * whole + ((rest,) if rest else ())


def hold(devices: Sequence[int], shares: Iterable[int]) -> bool:
    """Whether devices hold shares in some way: whole devices, or parts that lie on one each.

    In the order that is given Ray lays each part onto the device that is as full as can be; mostly that is a
    way. Where there are more ways than can be followed, Ray is to say.
    """
    wanted = list(shares)
    whole = sum(-(-share // RESOURCE_STEP) for share in wanted if share >= RESOURCE_STEP)
    if devices.count(RESOURCE_STEP) < whole:
        return False
    left = sorted(devices)[: len(devices) - whole]
    parts = [share for share in wanted if share < RESOURCE_STEP]
    return _in_turn(left, parts) or _in_some_way(tuple(left), tuple(sorted(parts, reverse=True)))


def laid(devices: Sequence[int], share: int) -> tuple[int, ...] | None:
    """What is left of devices when Ray has laid a share onto them; None where it does not.

    Whole devices, or a part of the one that is as full as can be.
    """
    part = min(share, RESOURCE_STEP)
    tightest = min((free for free in devices if free >= part), default=None)
    if tightest is None:
        return None
    left = list(devices)
    left[left.index(tightest)] -= part
    return tuple(left) if part == share else laid(left, share - part)


def _in_turn(devices: Sequence[int], parts: Iterable[int]) -> bool:
    """Whether Ray lays each part, as they come."""
    left: Sequence[int] | None = devices
    for part in parts:
        left = None if left is None else laid(left, part)
    return left is not None


@lru_cache(maxsize=4096)
def _in_some_way(devices: tuple[int, ...], parts: tuple[int, ...]) -> bool:
    ways = {devices}
    for part in parts:
        ways = {one for way in ways for one in _laid(way, part)}
        if len(ways) > _MOST_WAYS:
            return sum(parts) <= sum(devices)
    return bool(ways)


def _laid(devices: tuple[int, ...], part: int) -> Iterator[tuple[int, ...]]:
    """What is left of devices, in ascending order, with a part on any of those that hold it."""
    for free in {free for free in devices if free >= part}:
        left = list(devices)
        left[left.index(free)] = free - part
        yield tuple(sorted(left))


def shares_in(steps: int, share: int) -> int:
    """How many such shares devices have room for that have so much free together."""
    if share >= RESOURCE_STEP:
        return steps // RESOURCE_STEP // -(-share // RESOURCE_STEP)
    whole, rest = divmod(steps, RESOURCE_STEP)
    return whole * (RESOURCE_STEP // share) + rest // share
