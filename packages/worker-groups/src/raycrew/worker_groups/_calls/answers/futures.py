"""Results of a call on several ranks."""

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock, Thread
from typing import Any, Generic, Literal, overload

import ray
from typing_extensions import TypeVar

from raycrew.cluster_core import Session
from raycrew.worker_groups._calls.answers.endings import Endings, first_ended
from raycrew.worker_groups._calls.answers.ends import first_failure
from raycrew.worker_groups._calls.answers.failures import Whereabouts
from raycrew.worker_groups._calls.answers.recovery import Recovery
from raycrew.worker_groups._calls.answers.results import Results, in_thread
from raycrew.worker_groups._calls.answers.tasks import Awaited
from raycrew.worker_groups._calls.answers.waiting import deadline_after
from raycrew.worker_groups._ray import call_id, is_behind_proxy, run_on_node, while_connected
from raycrew.worker_groups._worker import Gathered, Join, recall, recall_all
from raycrew.worker_groups.errors import WorkerGroupClosedError, WorkerGroupError

logger = logging.getLogger(__name__)

R = TypeVar("R")
J = TypeVar("J", default=list[R])


class MultiWorkerFuture(Endings, Awaited[J], Generic[R, J]):
    """The calls of one method on several ranks: a list of ObjectRefs, so that `ray.get` takes it.

    Its types are that of each result, and of what `get_results` gives: the list of them, or the one value
    that the method's declaration (`sharded` and the like) makes of them.

    Waiting for it never consumes it, and it can be an argument of another group's call without passing
    through the driver: there it becomes what `get_results` gives.

    `await` gives what `get_results()` does, and asyncio takes it wherever it takes a coroutine
    (`create_task`, `gather`, `wait_for`, `TaskGroup`), more than once as well. Cancelling a task that awaits
    it (or a task made of it, however early) cancels the calls, as `cancel()` does; behind `asyncio.shield`
    they go on.

    Attributes:
        called_workers: Ranks that were called, one per ObjectRef.
        return_from_workers: Ranks whose results `get_results` returns.
        respect_tied_workers: Whether those are the leaders of tied groups.
        method: Name of the method.
        group_name: Name of the group.
        is_stream: Whether each call is a generator that yields as it goes.
        in_order: Whether the workers run their calls one after the other.

    Examples:
        >>> class Squares:
        ...     def square(self, x: int) -> int:
        ...         return x * x
        >>> with RayWorkerGroup(cluster, Squares) as group:
        ...     future = group.call(Squares.square, 7)
        ...     print(future.get_results(timeout=60), future.done())
        ...     print(sorted(future.as_completed()), future.called_workers)
        [49, 49] True
        [(0, 49), (1, 49)] [0, 1]
    """

    def __init__(
        self,
        futures: Sequence[Any],
        called_workers: Sequence[int] | None = None,
        return_from_workers: Sequence[int] | None = None,
        respect_tied_workers: bool = False,
        *,
        method: str = "",
        group_name: str = "",
        places: Mapping[int, Whereabouts] | None = None,
        timeout: float | None = None,
        is_stream: bool = False,
        in_order: bool = False,
        keeper: object = None,
        session: Session | None = None,
        recovery: Recovery | None = None,
        join: Join | None = None,
        diagnose: Callable[[WorkerGroupError, Hashable], object] | None = None,
    ) -> None:
        super().__init__(futures)
        self.called_workers = list(range(len(futures)) if called_workers is None else called_workers)
        if len(self.called_workers) != len(futures):
            raise ValueError(f"{len(futures)} futures of {len(self.called_workers)} ranks")
        returning = self.called_workers if return_from_workers is None else return_from_workers
        self.return_from_workers = list(returning)
        self.respect_tied_workers = respect_tied_workers
        self.method = method
        self.group_name = group_name
        self.is_stream = is_stream
        self.in_order = in_order
        self._keeper = keeper  # else the workers would end with their group while this is awaited
        self._session = session or Session.current()
        self._recovery, self._why = recovery, ()
        self._revival, self._looking, self._losses_told = None, Lock(), False
        self._join, self._diagnose = join, diagnose
        self._places = dict(places or {})
        self._sent_at = time.monotonic()
        self._deadline = deadline_after(timeout)
        self._arrived: list[tuple[int, Any]] = []
        self._broken: dict[int, Exception] = {}
        self._looked = False
        self._next: dict[int, Any] = {}
        self._turns = Lock()
        self._open_streams: dict[int, Any] = (
            dict(zip(self.called_workers, futures, strict=True)) if is_stream else {}
        )

    @property
    def futures(self) -> list[Any]:
        """The ObjectRefs (or generators of them), one per called rank."""
        return list(self)

    @property
    def used_workers(self) -> list[int]:
        """Ranks that were called."""
        return self.called_workers

    @property
    def ref(self) -> Any:
        """The ObjectRef of the only rank that was called, for `ray.get` and `ray.wait` of several.

        Raises:
            ValueError: There are none, or several.
        """
        if len(self) != 1:
            raise ValueError(f"{self!r} has {len(self)} ObjectRefs, not one: it is the list of them")
        return self[0]

    def __repr__(self) -> str:
        return f"MultiWorkerFuture({self.group_name}.{self.method}, ranks={self.called_workers})"

    @property
    def __name__(self) -> str:
        """What asyncio calls it where it shows a task."""
        return f"{self.group_name}.{self.method}"

    def _as_argument(self) -> Gathered:
        """What a worker is sent that gets this as an argument."""
        ref_of = dict(zip(self.called_workers, self, strict=True))
        return Gathered(tuple(ref_of[rank] for rank in self.return_from_workers), self._join)

    # As awaitables are: by identity, so that `asyncio.gather` takes several.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (list(self), self.called_workers, self.return_from_workers, self.respect_tied_workers)
        named = {"method": self.method, "group_name": self.group_name, "in_order": self.in_order}
        # Behind a proxy a session is this process's own; where this arrives, its ObjectRefs are that one's.
        session = None if is_behind_proxy() else self._session
        return _rebuild, (
            arguments,
            {**named, "places": self._places, "session": session, "join": self._join},
        )

    @overload
    def get_results(
        self,
        worker_group: Any = ...,
        timeout: float | None = ...,
        *,
        return_exceptions: Literal[False] = ...,
    ) -> J: ...

    @overload
    def get_results(
        self, worker_group: Any = ..., timeout: float | None = ..., *, return_exceptions: Literal[True]
    ) -> list[R | WorkerGroupError]: ...

    def get_results(
        self,
        worker_group: Any = None,  # noqa: ARG002
        timeout: float | None = None,
        *,
        return_exceptions: bool = False,
    ) -> Any:
        """The results of the ranks to return from, in rank order, or in that in which they were named.

        A generator's is the list of its items. Of a method that declares how its results are joined, the one
        value.

        Args:
            worker_group: Accepted because callers in this field pass it; it is not needed.
            timeout: Seconds to wait, besides the call's own deadline; None waits for that alone.
            return_exceptions: Wait for all, and give a `WorkerFailureError` or a `ResultTimeoutError` in the
                place of the result of a rank that has failed or not answered. These are never joined.

        Raises:
            WorkerFailureError: A rank failed, as soon as it did; several are an ExceptionGroup as well.
            ResultTimeoutError: Ranks have not answered in time. They go on, and can be waited for again.
            ResultJoinError: The results are there, and can't be joined as the method declares.
            WorkerGroupClosedError: The connection to Ray has ended, and the calls with it.
        """
        deadline = self._until(timeout)
        if return_exceptions:
            outcomes = self._recovered(self._outcomes, deadline)
            return [self._own(rank, outcomes[rank]) for rank in self.return_from_workers]
        return self._value(self._recovered(self._gathered, deadline))

    def get(self, timeout: float | None = None) -> J:
        """The same as `get_results(timeout=timeout)`."""
        return self.get_results(timeout=timeout)

    def as_completed(self, timeout: float | None = None) -> Results[tuple[int, R]]:
        """Pairs of rank and result as they come, of the ranks to return from; of a generator, each item.

        For `for` and for `async for`.

        Raises:
            WorkerFailureError: A rank failed.
            ResultTimeoutError: Ranks have not answered in time.
            WorkerGroupClosedError: The connection to Ray has ended, and the calls with it.
        """
        return Results(self._pairs(timeout))

    def cancel(self) -> None:
        """Ask for the calls to end: those that have not begun do, and async ones; others that run don't.

        The result of a cancelled call is a `WorkerFailureError` whose cause is Ray's `TaskCancelledError`.
        Workers that run their calls one after the other skip cancelled ones when it is their turn.
        """
        with suppress(WorkerGroupClosedError), while_connected(self._check):  # else the calls are gone
            if self.in_order:
                self._recall()
                return
            for ref in self:
                ray.cancel(ref, recursive=False)

    # Waiting.

    def _recall(self) -> None:
        elsewhere: dict[str, list[tuple[str, bytes]]] = {}
        for rank, ref in zip(self.called_workers, self, strict=True):
            where = self._places.get(rank)
            if where is not None and where.facts is not None:
                call = (where.facts.inbox, call_id(ref))
                if not recall(*call):
                    elsewhere.setdefault(where.facts.node_id, []).append(call)
        for node_id, calls in elsewhere.items():
            run_on_node(recall_all, [calls], node_id=node_id, own_process=False)

    def __await__(self) -> Generator[Any, None, J]:
        return self._results_async().__await__()

    async def _results_async(self) -> J:
        self._check()
        try:
            if not self.is_stream and (found := await self._quick()) is not None:
                value = partial(self._value, found)
                return value() if self._join is None else await in_thread(value)
            return await in_thread(self.get_results)
        except asyncio.CancelledError:
            self._give_up()
            raise

    async def _quick(self) -> dict[int, R] | None:
        """The results by rank where all is well; else `get_results` finds failures with their ranks."""
        with while_connected(self._check):
            calls = [ref.future() for ref in self]
        if await first_failure(calls, self._deadline, self._check) or not all(c.done() for c in calls):
            return None
        self._note_taken(ok=True)
        return {rank: call.result() for rank, call in zip(self.called_workers, calls, strict=True)}

    def _give_up(self) -> None:
        Thread(target=self._cancel_quietly, name="raycrew-cancel", daemon=True).start()

    def _cancel_quietly(self) -> None:
        try:
            self.cancel()
        except Exception:
            logger.exception("%r could not be cancelled", self)


@overload
def wait_any(
    futures: Sequence[MultiWorkerFuture[R, J]], timeout: float | None = ...
) -> list[MultiWorkerFuture[R, J]]: ...


@overload
def wait_any(
    futures: Sequence[MultiWorkerFuture[Any, Any]], timeout: float | None = ...
) -> list[MultiWorkerFuture[Any, Any]]: ...


def wait_any(futures: Sequence[Any], timeout: float | None = None) -> list[Any]:
    """Wait until every call of at least one of some futures has ended, well or not.

    A call that is to be sent again, once its group was restarted, has not: this begins the restart.

    Args:
        futures: Of any groups.
        timeout: Seconds to wait; None for no limit.

    Returns:
        Those whose calls have ended, in the order given; none where the time was over.

    Raises:
        ValueError: There are none to wait for.
        WorkerGroupClosedError: The connection to Ray has ended, and the calls with it.
    """
    if not futures:
        raise ValueError("wait_any() needs at least one future; it would wait for ever")
    return first_ended(futures, timeout)


def refuse_stream(value: Any) -> None:
    """Raise if an argument is a future whose results come as a stream.

    Raises:
        TypeError: It is one.
    """
    if isinstance(value, MultiWorkerFuture) and value.is_stream:
        raise TypeError(
            f"{value.group_name}.{value.method} is a generator method: its items come to the caller, and "
            "are no future that can be passed on; pass what get_results() gives"
        )


def refuse_as_items(value: Any, who: str) -> None:
    """Raise if what holds items is a future that is no list of results: its ObjectRefs are not what it gives.

    Args:
        value: What holds the items.
        who: What it is called.

    Raises:
        TypeError: It is one, joined or a stream.
    """
    refuse_stream(value)
    if isinstance(value, MultiWorkerFuture) and value._join is not None:  # noqa: SLF001 - of this module
        raise TypeError(
            f"{who} is the future of {value.group_name}.{value.method}, whose results are joined, and is no "
            "list of them: give what its get_results() gives"
        )


def _rebuild(arguments: Sequence[Any], named: Mapping[str, Any]) -> MultiWorkerFuture[Any, Any]:
    return MultiWorkerFuture(*arguments, **named)
