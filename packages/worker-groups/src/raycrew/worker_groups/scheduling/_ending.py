"""How the workers of a role end: engines first, then processes, then their places; number 0 last."""

import logging
from collections.abc import Callable, Sequence

from ray.exceptions import RayError

from raycrew.cluster_core import ClusterError
from raycrew.worker_groups._calls import deadline_after, left
from raycrew.worker_groups.errors import WorkerGroupError
from raycrew.worker_groups.scheduling._at_once import in_threads
from raycrew.worker_groups.scheduling._roles import Part, Role, Seat
from raycrew.worker_groups.scheduling._sending import send

logger = logging.getLogger(__name__)

_FAILURES = (WorkerGroupError, ClusterError, RayError)


def end_role(role: Role, timeout_s: float, one_by_one: bool = False) -> bool:
    """End a role: its engines, its processes, the stragglers among those, and then its places.

    Args:
        role: The role. Of one that is a second name, only the engines that were made under it end, and ports
            that were leased under it are given back.
        timeout_s: Seconds for engines and processes to end by themselves; then they are killed. With 0 they
            are killed at once.
        one_by_one: Whether engines end one after the other, those of the last worker first.

    Returns:
        Whether all ended by themselves, and nothing is left.
    """
    deadline = deadline_after(timeout_s)
    if not role.parts:
        ids = zip(role.job.worker_ids, role.seats, strict=True)
        hosts = [seat for worker_id, seat in ids if worker_id in role.hosts]
        return destroy_engines(hosts, role.name, deadline, one_by_one)
    is_clean = timeout_s > 0 and destroy_engines(role.seats, None, deadline, one_by_one)
    return end_parts(role.parts, deadline) and is_clean


def destroy_engines(
    seats: Sequence[Seat], owner: str | None, deadline: float | None, one_by_one: bool = False
) -> bool:
    """Destroy the engines of a role, or all, on number 0 once the others have, or half the time is over.

    Others may need what number 0 holds, such as a store where they meet; where they wait for it to end as
    well, it does after that time.
    """
    others, first = list(seats[1:]), list(seats[:1])
    batches = [[seat] for seat in reversed(seats)] if one_by_one else [others, first]
    is_clean = True
    for position, batch in enumerate(batches):
        time_s = left(deadline) or 0.0
        share = time_s if position == len(batches) - 1 else time_s / 2
        is_clean &= _destroyed(batch, owner, share)
    return is_clean


def _destroyed(seats: Sequence[Seat], owner: str | None, timeout_s: float) -> bool:
    """Whether engines ended well; all are asked at once, and one that does not answer keeps none waiting."""
    until, is_clean, calls = deadline_after(timeout_s), True, []
    for seat in seats:
        try:
            method, whose = ("destroy", ()) if owner is None else ("end_role", (owner,))
            calls.append((seat, send(seat, method, None, whose, {})))
        except _FAILURES as error:
            is_clean = _noted(seat, error)
    for seat, call in calls:
        try:
            call.get_results(timeout=left(until))
        except _FAILURES as error:
            is_clean = _noted(seat, error)
    return is_clean


def _noted(seat: Seat, error: Exception) -> bool:
    logger.warning("engines of %s, rank %d: %s", seat.group.name, seat.rank, error)
    return False


def end_parts(parts: Sequence[Part], deadline: float | None, *, force: bool = False) -> bool:
    """End groups, all but the first at once, and give their places back; that of number 0 is the last."""
    others, first = parts[1:], parts[:1]
    end: Callable[[Part], bool] = lambda part: _end_part(part, left(deadline) or 0.0, force)  # noqa: E731
    try:
        ended = in_threads(end, others) if others else []
    except RuntimeError:  # this process ends, and starts no threads any more
        ended = [end(part) for part in others]
    return all([*ended, *map(end, first)])


def _end_part(part: Part, timeout_s: float, force: bool) -> bool:
    try:
        return part.group.shutdown(timeout=timeout_s, force=force)
    except Exception:
        logger.exception("%s did not end well", part.group.name)
        return False
    finally:
        try:
            part.release()
        except Exception:
            logger.exception("the place of %s was not given back", part.group.name)
