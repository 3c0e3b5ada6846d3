"""Calls on the workers of roles: sent through their group, and errors that name worker and method."""

import itertools
import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pickle import PickleError
from typing import Any

from ray.exceptions import RayError

from raycrew.worker_groups._calls import (
    MultiWorkerFuture,
    deadline_after,
    dispatch_single,
    has_died,
    in_thread,
    left,
    log_tail,
    wait_any,
)
from raycrew.worker_groups._group import WorkerGroup
from raycrew.worker_groups._ray import may_come_back
from raycrew.worker_groups.errors import (
    ResultTimeoutError,
    WorkerFailureError,
    WorkerGroupClosedError,
    WorkerGroupError,
)
from raycrew.worker_groups.scheduling._at_once import in_threads
from raycrew.worker_groups.scheduling._roles import Role, Seat
from raycrew.worker_groups.scheduling.errors import (
    EngineCallError,
    SchedulerError,
    WorkerFailedError,
    WorkerTimeoutError,
)

logger = logging.getLogger(__name__)

_TRIES = 3
_WHY_S = 5.0  # for Ray to tell of what a worker died that its node has seen dead
_SENDER, _numbers = uuid.uuid4().hex, itertools.count()


def send(
    seat: Seat, method: str, timeout_s: float | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> MultiWorkerFuture[Any]:
    """Call a method of the server on one worker; keyword arguments may have any name, `timeout` too.

    Raises:
        WorkerGroupError: The group can't be called, or an argument can't be sent.
    """
    group = seat.group
    dispatch = dispatch_single(group._open(), method, args, kwargs, ranks=[seat.rank])  # noqa: SLF001
    try:
        return group._send(dispatch, timeout_s)  # noqa: SLF001
    except WorkerGroupError:
        raise
    except (TypeError, ValueError, PickleError) as error:
        why = str(error).partition("\n")[0]  # Ray's goes on for long
        raise _UnsentError(f"an argument can't be sent: {why}") from error


class _UnsentError(WorkerGroupError):
    """A call was not sent, as its arguments can't be."""


def call_engine(
    seat: Seat, engine: str, method: str, timeout_s: float, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a method of an engine and wait for what it gives; sent again only if it surely never began."""
    again = Again(seat, timeout_s)
    while True:
        arguments = ([engine, method, again.left_s, again.number], *args)
        try:
            return send(seat, "call", again.left_s, arguments, kwargs).get_results()[0]
        except WorkerFailureError as error:
            if not again.may(error):
                raise


async def call_engine_async(
    seat: Seat, engine: str, method: str, timeout_s: float, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The same without blocking the event loop; being cancelled cancels the call, if it has not begun."""
    again = Again(seat, timeout_s)
    while True:
        arguments = ([engine, method, again.left_s, again.number], *args)
        try:
            return (await send(seat, "call", again.left_s, arguments, kwargs))[0]
        except WorkerFailureError as error:
            if not await in_thread(partial(again.may, error)):
                raise


def _next_number() -> str:
    return f"{_SENDER}-{next(_numbers)}"


class Again:
    """Whether a call is sent once more: if its worker was out of reach, lives, and says that it never began.

    A worker runs its calls in the order in which they come, so what it is asked after a call it answers after
    that, if the call has come at all.

    Args:
        seat: The worker.
        timeout_s: Seconds for all tries together.
    """

    def __init__(self, seat: Seat, timeout_s: float) -> None:
        self._seat, self._deadline = seat, deadline_after(timeout_s)
        self._tries = _TRIES
        self.number = _next_number()

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return left(self._deadline) or 0.0

    def may(self, error: WorkerFailureError) -> bool:
        """Whether a call that failed so surely never began, and may be sent once more."""
        self._tries -= 1
        if not self._tries or error.cause is None or not may_come_back(error.cause):
            return False
        try:
            asked = send(self._seat, "has_begun", self.left_s, (self.number,), {})
            begun: bool = asked.get_results()[0]
        except (WorkerGroupError, RayError):
            return False
        self.number = _next_number()
        return not begun


def gathered(
    calls: Mapping[str, MultiWorkerFuture[Any]], method: str, deadline: float | None
) -> dict[str, Any]:
    """The results of calls on several workers, by worker; the first failure is raised at once.

    Raises:
        WorkerTimeoutError: Some have not returned in time.
        SchedulerError: One has failed.
    """
    waiting, results = dict(calls), dict[str, Any]()
    while waiting:
        ended = wait_any(list(waiting.values()), left(deadline))
        if not ended:
            raise WorkerTimeoutError(
                f"{method} has not returned on {list(waiting)}; it goes on", method=method
            )
        for worker_id in [one for one, call in waiting.items() if call in ended]:
            with told_as(worker_id, method):
                results[worker_id] = waiting.pop(worker_id).get_results()[0]
    return results


@contextmanager
def told_as(worker_id: str, method: str, kind: type[SchedulerError] = EngineCallError) -> Iterator[None]:
    """Within, what worker groups raise of a call is raised as an error of the scheduler.

    Args:
        worker_id: Whom the call is for.
        method: What is called, in words.
        kind: What an error of the worker's code becomes, unless it is a scheduler's error already.

    Raises:
        SchedulerError: Always one, in place of a worker group's.
    """
    try:
        yield
    except SchedulerError:
        raise
    except (WorkerGroupError, RayError) as error:
        raise error_of(worker_id, method, error, kind) from error


def error_of(
    worker_id: str, method: str, error: Exception, kind: type[SchedulerError] = EngineCallError
) -> SchedulerError:
    """What an error of a worker group's call is for a scheduler."""
    said = f"{worker_id}: {method}"
    known: dict[str, Any] = {"worker_id": worker_id, "method": method, "cause": error}
    if isinstance(error, ResultTimeoutError):
        return WorkerTimeoutError(f"{said} has not returned in time; it goes on", **known)
    if isinstance(error, WorkerGroupClosedError):
        return WorkerFailedError(f"{said}: its workers have ended, or the connection to Ray has", **known)
    if isinstance(error, _UnsentError):
        known["cause"] = error.__cause__
    if not isinstance(error, WorkerFailureError):
        return kind(f"{said} failed: {error}", **known)
    known |= {"pid": error.pid, "node_id": error.node_id, "log_tail": error.log_tail}
    if has_died(error):
        what = "can't be reached" if may_come_back(error.cause or error) else "has died"
        return WorkerFailedError(f"{said}: its process {what}. {error.message}", **known)
    known["cause"] = cause = error.cause or error
    if isinstance(cause, SchedulerError):  # the server's own: those of engines' schedulers are causes
        return type(cause)(f"{said}: {cause.args[0]}", **{**known, "cause": cause.cause})
    return kind(f"{said} raised {type(cause).__name__}: {cause}\n{error.traceback}".rstrip(), **known)


def check_alive(role: Role, timeout_s: float) -> None:
    """Raise if a worker of a role is seen to have died; all its groups are asked at once.

    A worker whose node does not answer in time, of which its group warns in the log, counts as alive.

    Raises:
        WorkerFailedError: One has.
    """
    deadline, seated = deadline_after(timeout_s), dict[WorkerGroup, dict[int, str]]()
    for worker_id, seat in zip(role.job.worker_ids, role.seats, strict=True):
        seated.setdefault(seat.group, {})[seat.rank] = worker_id

    def dead_of(group: WorkerGroup) -> list[str]:
        ids = seated[group]
        with told_as(next(iter(ids.values())), "ping", WorkerFailedError):
            told = group.ping(list(ids), left(deadline) or 0.0)
        return [ids[rank] for rank, status in told.items() if status == "dead"]

    groups = list(seated)
    found = in_threads(dead_of, groups, len(groups)) if len(groups) > 1 else [dead_of(groups[0])]
    for worker_id in (one for dead in found for one in dead):
        seat = role.seats[role.job.worker_ids.index(worker_id)]
        raise _seen_dead(worker_id, seat, left(deadline, _WHY_S))


def _seen_dead(worker_id: str, seat: Seat, timeout_s: float | None) -> WorkerFailedError:
    facts = seat.group._workers().facts[seat.rank]  # noqa: SLF001
    known: dict[str, Any] = {"worker_id": worker_id, "pid": facts.pid, "node_id": facts.node_id}
    if (failure := _failure_of(seat, timeout_s)) is None:
        return WorkerFailedError(f"{worker_id} has died", log_tail=log_tail(facts), **known)
    known |= {"log_tail": failure.log_tail, "cause": failure}
    return WorkerFailedError(f"{worker_id} has died: {failure.message}", **known)


def _failure_of(seat: Seat, timeout_s: float | None) -> WorkerFailureError | None:
    """How a call of a dead worker fails, which says of what it died; None if Ray does not know that yet."""
    try:
        send(seat, "ping", timeout_s, (), {}).get_results()
    except WorkerFailureError as error:
        if has_died(error) and not may_come_back(error.cause or error):
            return error
    except (WorkerGroupError, RayError) as error:
        logger.debug("%s, rank %d: %s", seat.group.name, seat.rank, error)
    return None
