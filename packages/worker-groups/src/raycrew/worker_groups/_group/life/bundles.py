"""Whose bundles are whose: claimed for a group, and given back once nothing can use them any more."""

import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ray.exceptions import RayError

from raycrew.cluster_core import BundlesOccupiedError, Claim, Cluster, ClusterError
from raycrew.worker_groups._calls import deadline_after, left
from raycrew.worker_groups._group.life.abandoned import catch_up
from raycrew.worker_groups._group.life.leftovers import keep, try_again
from raycrew.worker_groups._health import Ended
from raycrew.worker_groups._start import JoinedClaim
from raycrew.worker_groups.errors import WorkerGroupError

ABANDONED_S = 30.0

logger = logging.getLogger(__name__)


class Crew(Protocol):
    """The workers of a group without the group, so that they can be ended when it is gone."""

    name: str
    claim: Claim

    def end(self, timeout_s: float, force: bool) -> Ended:
        """End them, by rank; they may have ended before."""
        ...


def end_and_release(crew: Crew, timeout_s: float, force: bool) -> Ended:
    """End workers, and give their bundles back once nothing can use them any more."""
    ended = crew.end(timeout_s, force)
    log_left(crew.name, ended)
    release_when_free(ended, crew.claim)
    return ended


def release_when_free(ended: Ended, claim: Claim) -> None:
    """Give bundles back, or keep them until a later try finds that nothing can use them any more."""
    if ended.occupied:
        keep(partial(_try_to_release, ended, claim))
    else:
        claim.release()


def _try_to_release(ended: Ended, claim: Claim) -> bool:
    try:
        if (occupied := ended.once_more().occupied) is False:
            claim.release()
    except (WorkerGroupError, ClusterError, RayError) as error:
        logger.warning("bundles can't be given back yet: %s", error)
        return False
    return not occupied


def log_left(name: str, ended: Ended) -> None:
    """Warn of workers that are not known to have ended."""
    for rank, why in ended.left.items():
        logger.warning("%s: rank %d is not known to have ended: %s", name, rank, why)


def claim_more(cluster: Cluster, own: Claim, n: int, name: str) -> Claim:
    """The first free bundles of a cluster, in its order, besides those that a group has.

    Args:
        cluster: The cluster.
        own: Those that it has.
        n: How many.
        name: Name of the group.

    Raises:
        ValueError: The cluster has fewer bundles besides.
        BundlesOccupiedError: Fewer of them are free; says who holds the others.
    """
    return _once_free(partial(_claim_free, cluster, own, n, name))


def _claim_free(cluster: Cluster, own: Claim, n: int, name: str) -> Claim:
    occupied: set[int] = set()
    while True:
        held = _indices(own)
        others = [bundle.index for bundle in cluster.bundles if bundle.index not in held]
        if len(others) < n:
            raise ValueError(f"{name!r} asks for {n} bundle(s) more; its cluster has {len(others)} besides")
        free = [index for index in others if index not in occupied]
        try:
            claim = cluster.claim(free[:n] if len(free) >= n else others, name)
        except BundlesOccupiedError as error:
            if len(free) < n:
                raise
            occupied |= set(error.holders)
            continue
        if _indices(claim).isdisjoint(_indices(own)):
            claim.give_back(range(n, len(claim.bundles)))  # of who has just given them back
            return JoinedClaim.of(claim).at(range(n))
        claim.release()  # the claim has learnt devices, and bundles have other indices since


def _indices(claim: Claim) -> set[int]:
    return {bundle.index for bundle in claim.bundles}


def claim_bundles(cluster: Cluster, indices: Sequence[int] | None, name: str) -> Claim:
    """The bundles of a group, once those of groups that nobody can use any more are free.

    Raises:
        BundlesOccupiedError: Another group holds them.
    """
    return _once_free(partial(cluster.claim, indices, name))


def _once_free(claim: Callable[[], Claim]) -> Claim:
    try:
        return claim()
    except BundlesOccupiedError:
        gc.collect()  # perhaps by groups that nobody can use any more
        deadline = deadline_after(ABANDONED_S)
        catch_up(left(deadline) or 0.0)
        try_again(left(deadline) or 0.0)
        return claim()
