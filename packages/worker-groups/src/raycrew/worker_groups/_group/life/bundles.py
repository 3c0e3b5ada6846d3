"""Whose bundles are whose: claimed for a group, and given back once nothing can use them any more."""

import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ray.exceptions import RayError

from raycrew.cluster_core import Bundle, BundlesOccupiedError, Claim, Cluster, ClusterError
from raycrew.worker_groups._calls import deadline_after, left
from raycrew.worker_groups._group.life.abandoned import catch_up
from raycrew.worker_groups._group.life.leftovers import keep, try_again
from raycrew.worker_groups._health import Ended
from raycrew.worker_groups._start import GroupSpec, JoinedClaim, Place, launcher_of, worker_aliases
from raycrew.worker_groups.errors import WorkerGroupError
from raycrew.worker_groups.sharding import with_seats

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


def _nothing(_: Bundle) -> int:
    return 0


def claim_more(
    cluster: Cluster,
    own: Claim,
    n: int,
    name: str,
    fits: Callable[[Bundle], object] = bool,
    waste: Callable[[Bundle], int] = _nothing,
) -> Claim:
    """The first free bundles of a cluster, in its order, besides those that a group has.

    Args:
        cluster: The cluster.
        own: Those that it has.
        n: How many.
        name: Name of the group.
        fits: Whether a bundle will do.
        waste: How much of it nobody would use; the least comes first.

    Raises:
        ValueError: The cluster has fewer such bundles besides.
        BundlesOccupiedError: Fewer of them are free; says who holds the others.
    """
    return _once_free(partial(_claim_free, cluster, own, n, name, fits, waste))


def _claim_free(
    cluster: Cluster,
    own: Claim,
    n: int,
    name: str,
    fits: Callable[[Bundle], object],
    waste: Callable[[Bundle], int],
) -> Claim:
    occupied: set[int] = set()
    while True:
        held = _indices(own)
        besides = [bundle for bundle in cluster.bundles if bundle.index not in held and fits(bundle)]
        others = [bundle.index for bundle in sorted(besides, key=waste)]
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


def claim_places(spec: GroupSpec, claim: Claim) -> list[Place]:
    """The spare bundles of a group, each with as much as any of its ranks has, and if possible nothing else.

    Args:
        spec: What the group is to be.
        claim: The bundles of its ranks.

    Raises:
        ValueError: The cluster has fewer such bundles besides; or not all workers are started alike.
        BundlesOccupiedError: Fewer of them are free.
    """
    if not spec.options.n_spare:
        return []
    aliases, launchers = worker_aliases(spec.name, spec.plan), spec.options.launchers
    if spec.options.standby and len({launcher_of(launchers, alias) for alias in aliases}) > 1:
        raise ValueError("standby= is for workers that are all started alike; launchers= tells some apart")
    own = claim.bundles
    kinds = {name for bundle in own for name in bundle.resources}

    def fits(bundle: Bundle) -> bool:
        amounts = [amount for one in own for amount in one.resources.items()]
        return all(bundle.resources.get(name, 0.0) >= amount for name, amount in amounts)

    def waste(bundle: Bundle) -> int:
        return len(bundle.resources.keys() - kinds)

    found = claim_more(spec.cluster, claim, spec.options.n_spare, spec.name, fits, waste)
    more = JoinedClaim.of(found)
    seats = with_seats(spec.plan, spec.cluster.bundles, more.bundles).seats[len(spec.plan.seats) :]
    return [Place(more.at([position]), seat) for position, seat in enumerate(seats)]


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
