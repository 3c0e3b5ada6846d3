"""Results of a call on several ranks."""

import asyncio
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import ray

from raycrew.cluster_core import Session
from raycrew.worker_groups._calls.failures import Whereabouts, failure, log_tail
from raycrew.worker_groups._calls.waiting import (
    Settled,
    await_some,
    deadline_after,
    left,
    settle,
)
from raycrew.worker_groups._ray import (
    call_id,
    check_session,
    is_behind_proxy,
    is_death,
    run_on_node,
    while_connected,
)
from raycrew.worker_groups._worker import recall, recall_all
from raycrew.worker_groups.errors import (
    ResultTimeoutError,
    WorkerFailureError,
    WorkerGroupClosedError,
    combine,
)

R = TypeVar("R")

_SLICE_S = 1.0
_MAX_TAILS = 4


class MultiWorkerFuture(list[Any], Generic[R]):
    """The calls of one method on several ranks: a list of ObjectRefs, so that `ray.get` takes it.

    Waiting for it never consumes it, and it can be an argument of another group's call without passing
    through the driver: there it becomes the list of results.

    Attributes:
        called_workers: Ranks that were called, one per ObjectRef.
        return_from_workers: Ranks whose results `get_results` returns.
        respect_tied_workers: Whether those are the leaders of tied groups.
        method: Name of the method.
        group_name: Name of the group.
        is_stream: Whether each call is a generator that yields as it goes.
        in_order: Whether the workers run their calls one after the other.
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
        self._places = dict(places or {})
        self._sent_at = time.monotonic()
        self._deadline = deadline_after(timeout)
        self._arrived: list[tuple[int, Any]] = []
        self._broken: dict[int, Exception] = {}
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

    def __repr__(self) -> str:
        return f"MultiWorkerFuture({self.group_name}.{self.method}, ranks={self.called_workers})"

    # As awaitables are: by identity, so that `asyncio.gather` takes several.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (list(self), self.called_workers, self.return_from_workers, self.respect_tied_workers)
        named = {"method": self.method, "group_name": self.group_name, "in_order": self.in_order}
        # Behind a proxy a session is this process's own; where this arrives, its ObjectRefs are that one's.
        session = None if is_behind_proxy() else self._session
        return _rebuild, (arguments, {**named, "places": self._places, "session": session})

    def get_results(self, worker_group: Any = None, timeout: float | None = None) -> list[R]:  # noqa: ARG002
        """The results of the ranks to return from, in rank order; a generator's is the list of its items.

        Args:
            worker_group: Accepted because callers in this field pass it; it is not needed.
            timeout: Seconds to wait, besides the call's own deadline; None waits for that alone.

        Raises:
            WorkerFailureError: A rank failed, as soon as it did; several are an ExceptionGroup as well.
            ResultTimeoutError: Ranks have not answered in time. They go on, and can be waited for again.
            WorkerGroupClosedError: The connection to Ray has ended, and the calls with it.
        """
        deadline = self._until(timeout)
        if self.is_stream:
            items: dict[int, list[Any]] = {rank: [] for rank in self.called_workers}
            for rank, item in self._stream(deadline):
                items[rank].append(item)
            return [items[rank] for rank in self.return_from_workers]  # type: ignore[misc]
        values = dict(zip(self.called_workers, self._all(deadline), strict=True))
        return [values[rank] for rank in self.return_from_workers]

    def get(self, timeout: float | None = None) -> list[R]:
        """The same as `get_results(timeout=timeout)`."""
        return self.get_results(timeout=timeout)

    def as_completed(self, timeout: float | None = None) -> Iterator[tuple[int, R]]:
        """Pairs of rank and result as they come, of the ranks to return from; of a generator, each item.

        Raises:
            WorkerFailureError: A rank failed.
            ResultTimeoutError: Ranks have not answered in time.
            WorkerGroupClosedError: The connection to Ray has ended, and the calls with it.
        """
        deadline = self._until(timeout)
        returning = set(self.return_from_workers)
        if self.is_stream:
            yield from ((rank, item) for rank, item in self._stream(deadline) if rank in returning)
            return
        rank_of = dict(zip(self, self.called_workers, strict=True))
        waiting = list(self)
        while waiting:
            ready = await_some(waiting, deadline, self._check)
            if not ready:
                raise self._timed_out([rank_of[ref] for ref in waiting])
            waiting.remove(ready[0])
            rank = rank_of[ready[0]]
            try:
                with while_connected(self._check) as session:
                    value = session.get(ready[0])
            except Exception as error:
                raise self._failed(self._settled({rank: error}, [rank_of[ref] for ref in waiting])) from error
            if rank in returning:
                yield rank, value

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

    # For balancers.

    @property
    def _ends(self) -> list[Any]:
        """What is ready when a call has ended: its result, or the end of its stream."""
        return [call.completed() for call in self] if self.is_stream else list(self)

    def _wait_for(self, ends: Sequence[Any], count: int, timeout: float | None) -> Collection[Any]:
        """Wait for as many of some `_ends` and no longer than `timeout`; gives those that are ready."""
        return await_some(ends, deadline_after(timeout), self._check, count=count)

    def _died(self, end: Any) -> bool:
        """Whether the worker of one of `_ends` that is ready was lost with the call."""
        self._check()
        try:
            with while_connected(self._check) as session:
                session.get(end)
        except Exception as error:  # noqa: BLE001 - what the method raised is for whoever takes the result
            return is_death(error)
        return False

    # Waiting.

    def _check(self) -> None:
        check_session(self._session, f"{self.group_name}.{self.method}")

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

    def __await__(self) -> Generator[Any, None, list[R]]:
        return self._results_async().__await__()

    async def _results_async(self) -> list[R]:
        self._check()
        if not self.is_stream:
            with while_connected(self._check):
                calls = [asyncio.wrap_future(ref.future()) for ref in self]
            done = await self._first_exception(calls)
            if len(done) == len(calls) and not any(call.exception() for call in done):
                values = {rank: call.result() for rank, call in zip(self.called_workers, calls, strict=True)}
                return [values[rank] for rank in self.return_from_workers]
        return await asyncio.to_thread(self.get_results)

    async def _first_exception(self, calls: Sequence[asyncio.Future[Any]]) -> set[asyncio.Future[Any]]:
        """Those that are done when all are, when one has failed, or when the call's time is over."""
        while True:
            timeout = left(self._deadline, _SLICE_S)
            done, waiting = await asyncio.wait(calls, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
            self._check()
            failed = any(call.cancelled() or call.exception() for call in done)
            if failed or not waiting or left(self._deadline) == 0.0:
                return done

    def _until(self, timeout: float | None) -> float | None:
        own, asked = self._deadline, deadline_after(timeout)
        return asked if own is None else own if asked is None else min(own, asked)

    def _all(self, deadline: float | None) -> list[Any]:
        """Every value, in one `ray.get` where all is well and quick; else failures are found early."""
        self._check()
        try:
            with while_connected(self._check) as session:
                return list(session.get(list(self), timeout=left(deadline, _SLICE_S)))
        except Exception:  # noqa: BLE001 - what failed, or is late, is found out below with its rank
            return self._values(settle(self, deadline, self._check))

    def _values(self, settled: Settled) -> list[Any]:
        if settled.errors:
            ranks = self.called_workers
            errors = {ranks[i]: error for i, error in settled.errors.items()}
            raise self._failed(self._settled(errors, [ranks[i] for i in settled.pending]))
        if settled.pending:
            raise self._timed_out([self.called_workers[i] for i in settled.pending])
        return [settled.values[i] for i in range(len(self))]

    def _stream(self, deadline: float | None) -> Iterator[tuple[int, Any]]:
        """Items that came before, whoever took them in, then new ones as they come."""
        given = 0
        while True:
            while given < len(self._arrived):
                given += 1
                yield self._arrived[given - 1]
            if self._broken:
                raise self._failed(self._settled(self._broken, list(self._open_streams)))
            if not self._open_streams:
                return
            self._take_in(deadline)

    def _take_in(self, deadline: float | None) -> None:
        """One more item, or the end of a stream."""
        rank_of = {stream: rank for rank, stream in self._open_streams.items()}
        ready = await_some(list(rank_of), deadline, self._check)
        if not ready:
            raise self._timed_out(sorted(self._open_streams))
        stream: Any = ready[0]
        rank = rank_of[stream]
        try:
            with while_connected(self._check) as session:
                item = session.get(next(stream))
            self._arrived.append((rank, item))
        except StopIteration:
            del self._open_streams[rank]
        except Exception as error:  # noqa: BLE001 - told now and at every later look, with its rank
            del self._open_streams[rank]
            self._broken[rank] = error

    @staticmethod
    def _settled(errors: Mapping[int, Exception], pending: Sequence[int]) -> Settled:
        return Settled(errors=dict(errors), pending=sorted(pending))

    def _failed(self, by_rank: Settled) -> Exception:
        """One error for the failures of some ranks."""
        self._check()  # else what failed is the connection
        elapsed = time.monotonic() - self._sent_at
        failures: list[WorkerFailureError] = []
        for rank, error in sorted(by_rank.errors.items()):
            where = self._places.get(rank) or Whereabouts(self.group_name, seat=f"rank {rank}")
            tail = log_tail(where.facts) if len(failures) < _MAX_TAILS else ""
            pending = by_rank.pending
            failures.append(
                failure(where, error, self.method, elapsed_s=elapsed, pending=pending, log_tail=tail)
            )
        return combine(failures)

    def _timed_out(self, ranks: Sequence[int]) -> ResultTimeoutError:
        elapsed = time.monotonic() - self._sent_at
        return ResultTimeoutError(
            f"{self.group_name}.{self.method}: ranks {sorted(ranks)} have not answered {elapsed:.1f} s after "
            "the call; they go on, and the same future can be waited for again",
            sorted(ranks),
        )


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


def _rebuild(arguments: Sequence[Any], named: Mapping[str, Any]) -> MultiWorkerFuture[Any]:
    return MultiWorkerFuture(*arguments, **named)
