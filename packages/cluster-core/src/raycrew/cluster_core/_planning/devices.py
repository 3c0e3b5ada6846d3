"""Devices that Ray counts one by one: what fits into their sum need not fit into any of them."""

from collections.abc import Iterable, Sequence

from raycrew.cluster_core._topology import RESOURCE_STEP


def devices_in(steps: int) -> tuple[int, ...]:
    """Devices that have so much free together: whole ones, and one with the rest.

    Ray tells the sum alone, and fills a device before it begins another one.
    """
    whole, rest = divmod(steps, RESOURCE_STEP)
    return (RESOURCE_STEP,) * whole + ((rest,) if rest else ())


def hold(devices: Sequence[int], shares: Iterable[int]) -> bool:
    """Whether devices hold shares as Ray lays them: whole devices, or of one that is as full as can be."""
    left = list(devices)
    for share in sorted(shares, reverse=True):
        whole = -(-share // RESOURCE_STEP) if share >= RESOURCE_STEP else 0
        if whole:
            if left.count(RESOURCE_STEP) < whole:
                return False
            for _ in range(whole):
                left.remove(RESOURCE_STEP)
        else:
            fitting = [free for free in left if free >= share]
            if not fitting:
                return False
            tightest = min(fitting)
            left[left.index(tightest)] = tightest - share
    return True


def shares_in(steps: int, share: int) -> int:
    """How many such shares devices have room for that have so much free together."""
    if share >= RESOURCE_STEP:
        return steps // RESOURCE_STEP // -(-share // RESOURCE_STEP)
    whole, rest = divmod(steps, RESOURCE_STEP)
    return whole * (RESOURCE_STEP // share) + rest // share
