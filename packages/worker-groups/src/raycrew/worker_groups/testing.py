"""For tests: a worker group in this process, without Ray.

with InProcessGroup(FakeCluster([2]), Policy, scale=10) as group:
    assert group.call(Policy.step, 4).get_results() == [40, 40]
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    CancelledError,
    Future,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from raycrew.worker_groups._base import WorkerGroup
from raycrew.worker_groups._calls import (
    Dispatch,
    MultiWorkerFuture,
    Whereabouts,
    failure,
    left,
    refuse_stream,
    start_timeout,
)
from raycrew.worker_groups._health import Ended
from raycrew.worker_groups._ranks import WorkerFacts, assign_ranks, rank_order
from raycrew.worker_groups._ray import WorkerStatus, unwrap_actor_class
from raycrew.worker_groups._start import Handle, Started, StartupReport, Stopwatch, check_init
from raycrew.worker_groups._worker import CurrentWorker, as_current, be_current, describe_class, load_class
from raycrew.worker_groups.errors import ResultTimeoutError, WorkerFailureError, combine
from raycrew.worker_groups.protocols import ArgumentTransport

__all__ = ["InProcessFuture", "InProcessGroup"]

T = TypeVar("T")


class InProcessFuture(MultiWorkerFuture[Any]):
    """A `MultiWorkerFuture` of this process: a list of `concurrent.futures.Future`, not for `ray.get`.

    Items of generator methods come when the generator has ended.
    """

    def get_results(self, worker_group: Any = None, timeout: float | None = None) -> list[Any]:  # noqa: ARG002
        """See `MultiWorkerFuture.get_results`."""
        deadline = self._until(timeout)
        values = dict(self._done_in_turn(deadline))
        return [values[rank] for rank in self.return_from_workers]

    def as_completed(self, timeout: float | None = None) -> Iterator[tuple[int, Any]]:
        """See `MultiWorkerFuture.as_completed`."""
        for rank, value in self._done_in_turn(self._until(timeout)):
            if rank in self.return_from_workers:
                yield from ((rank, item) for item in value) if self.is_stream else [(rank, value)]

    def cancel(self) -> None:
        """See `MultiWorkerFuture.cancel`; the cause is `concurrent.futures.CancelledError` here."""
        for call in self:
            call.cancel()

    @property
    def _ends(self) -> list[Any]:
        return list(self)

    def _wait_for(self, ends: Sequence[Any], count: int, timeout: float | None) -> Collection[Any]:
        # Balancers ask for one or for all.
        return wait(ends, timeout, FIRST_COMPLETED if count == 1 else ALL_COMPLETED).done

    def _died(self, end: Any) -> bool:  # noqa: ARG002
        return False

    async def _results_async(self) -> list[Any]:
        return await asyncio.to_thread(self.get_results)

    def _done_in_turn(self, deadline: float | None) -> Iterator[tuple[int, Any]]:
        rank_of = dict(zip(self, self.called_workers, strict=True))
        waiting = set(self)
        while waiting:
            done, waiting = wait(waiting, timeout=left(deadline), return_when=FIRST_COMPLETED)
            if not done:
                raise self._timed_out([rank_of[call] for call in waiting])
            failed = {rank_of[call]: error for call in done if (error := _error_of(call))}
            if failed:
                raise combine([self._failure(rank, error) for rank, error in sorted(failed.items())])
            yield from [(rank_of[call], call.result()) for call in done]

    def _failure(self, rank: int, error: BaseException) -> WorkerFailureError:
        return failure(self._places[rank], error, self.method, elapsed_s=time.monotonic() - self._sent_at)


def _error_of(call: Future[Any]) -> BaseException | None:
    try:
        return call.exception()
    except CancelledError as error:
        return error


class InProcessGroup(WorkerGroup):
    """A worker group whose workers are objects of this process, each with a thread of its own.

    It is made, asked, called and ended as a `RayWorkerGroup` is, with the same checks and the same errors;
    calls of one worker run one after the other, those of several at the same time. What needs processes of
    their own is accepted and does nothing: workers share this process's environment and interpreter, so
    `env_vars`, `secrets`, `environments` and `RANK` and the like are not set (`current_worker()` tells all of
    it), and none is ever lost. `port_range` and `progress` do nothing either.

    Args:
        cluster: Any `Cluster`; a `FakeCluster` needs no Ray.
        worker: See `RayWorkerGroup`; a name must be importable here.
        workers_per_node: See `RayWorkerGroup`, as for all others.

    Raises:
        WorkerFailureError: An `__init__` raised, or was late (`WorkerStartTimeoutError`).
        TypeError: Arguments don't fit `__init__`.
        ValueError: The layout doesn't fit the cluster.
    """

    def _start(self) -> Started:
        watch, spec = Stopwatch(), self._spec
        cls, options = _class_of(spec.builder.worker)
        requests = [
            {"num_gpus": 0, "bundle_indices": seat.tied_bundles, "num_gpus_per_node": 0}
            for seat in spec.plan.seats
        ]
        info = describe_class(cls, options, requests)
        kwargs = [{**spec.builder.kwargs, **spec.init_kwargs, **own.init_kwargs} for own in info.configured]
        for each in kwargs:
            check_init(info, spec.builder.args, each)
        report = StartupReport(spec.name, environment_s=watch.lap())
        bundles = self._claim.bundles
        facts = [self._facts(bundle.index) for bundle in bundles]
        order = rank_order(spec.plan, facts)
        ranks = assign_ranks(order, facts, [bundle.index for bundle in bundles], spec.name)
        here = [facts[position] for position in order]
        self._crew: _Threads = _Threads(spec.name)
        self._crew.workers = [
            _Worker(as_current(rank, fact, spec.options.communication), spec.transport)
            for rank, fact in zip(ranks, here, strict=True)
        ]
        calls = [
            worker.start(cls, spec.builder.args, kwargs[position])
            for worker, position in zip(self._crew.workers, order, strict=True)
        ]
        places = {
            info.rank: Whereabouts(spec.name, info, fact) for info, fact in zip(ranks, here, strict=True)
        }
        starting = InProcessFuture(calls, method="__init__", group_name=spec.name, places=places)
        try:
            init_s = starting.get_results(timeout=spec.options.init_timeout_s)
        except ResultTimeoutError as late:
            self._crew.end(0.0, force=True)
            others = [str(places[rank]) for rank in late.pending[1:]]
            stage = "its __init__ did not return"
            raise start_timeout(places[late.pending[0]], stage, others, spec.options.init_timeout_s) from None
        except BaseException:
            self._crew.end(0.0, force=True)
            raise
        for rank, seconds in enumerate(init_s):
            report.workers[rank] = {"placement": 0.0, "process": 0.0, "import": 0.0, "init": seconds}
        report.total_s = watch.total_s
        handles = [cast("Handle", _Handle(worker)) for worker in self._crew.workers]
        return Started(handles, ranks, here, order, info, [], report)

    def _facts(self, bundle_index: int) -> WorkerFacts:
        leased = self.cluster.rendezvous(bundle_index, 1 + self._spec.options.ports_per_worker)
        return WorkerFacts(
            leased.node_id,
            leased.address,
            threading.get_native_id(),
            master_port=leased.ports[0],
            ports=tuple(leased.ports[1:]),
        )

    @property
    def instances(self) -> list[Any]:
        """The workers themselves, in rank order, to look into."""
        return [worker.instance for worker in self._crew.workers]

    def get_worker_status(self, timeout: float = 1.0) -> dict[int, WorkerStatus]:
        """What each rank is up to: "ready", or "busy" (it did not answer within `timeout` seconds)."""
        self._open()
        asked = [worker.thread.submit(_nothing) for worker in self._crew.workers]
        done = wait(asked, timeout).done
        return {rank: "ready" if call in done else "busy" for rank, call in enumerate(asked)}

    def restart_failed_workers(self) -> list[int]:
        """Nothing, as none is ever lost."""
        self._open()
        return self._life.restart(list)

    def __reduce__(self) -> str:
        raise TypeError(f"{self.name!r} is a group of threads of this process, and can't be pickled")

    def _resource_use(self) -> Mapping[int, float]:
        return {}

    def _deliver(self, dispatch: Dispatch, timeout: float | None) -> MultiWorkerFuture[Any]:
        for send in dispatch.sends:
            for value in (*send.args, *send.kwargs.values()):
                refuse_stream(value)
        return InProcessFuture(
            [self._crew.workers[s.rank].send(dispatch.method.name, s.args, s.kwargs) for s in dispatch.sends],
            [send.rank for send in dispatch.sends],
            dispatch.return_from,
            dispatch.respect_tied_workers,
            method=dispatch.method.name,
            group_name=self.name,
            places=self._places,
            timeout=timeout,
            is_stream="generator" in dispatch.method.kind,
            keeper=self._keeper,
        )


def _class_of(worker: Any) -> tuple[type, dict[str, Any]]:
    return load_class(worker) if isinstance(worker, str) else unwrap_actor_class(worker)


def _nothing() -> None:
    """What a worker that has time can do at once."""


class _Worker:
    """One worker with its thread."""

    def __init__(self, current: CurrentWorker, transport: ArgumentTransport | None) -> None:
        self.instance: Any = None
        self.busy = False
        self._transport = transport
        self.thread = ThreadPoolExecutor(1, f"{current.group_name}-{current.rank}", be_current, (current,))

    def start(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[float]:
        """Construct the worker; gives the seconds that took."""
        sent = self._sent(args, kwargs)

        def construct() -> float:
            begin = time.perf_counter()
            self.instance = self._call(cls, *sent)
            return time.perf_counter() - begin

        return self._submit(construct)

    def send(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Call a method when it is its turn."""
        return self._submit(self._run, getattr(self.instance, name), *self._sent(args, kwargs))

    def _submit(self, fn: Callable[..., T], *args: Any) -> Future[T]:
        return self.thread.submit(self._noted, fn, *args)

    def _noted(self, fn: Callable[..., T], *args: Any) -> T:
        self.busy = True
        try:
            return fn(*args)
        finally:
            self.busy = False

    def _run(self, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = self._call(method, args, kwargs)
        if inspect.iscoroutine(result):
            return self._out(asyncio.run(result))
        if inspect.isasyncgen(result):
            return list(map(self._out, asyncio.run(_listed(result))))
        return list(map(self._out, result)) if inspect.isgenerator(result) else self._out(result)

    def _call(self, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return method(*map(self._in, args), **{name: self._in(value) for name, value in kwargs.items()})

    def _sent(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        return [self._pack(arg) for arg in args], {name: self._pack(value) for name, value in kwargs.items()}

    def _pack(self, value: Any) -> Any:
        return value if isinstance(value, MultiWorkerFuture | Future) else self._out(value)

    def _out(self, value: Any) -> Any:
        return value if self._transport is None else self._transport.encode(value)

    def _in(self, value: Any) -> Any:
        if isinstance(value, MultiWorkerFuture):
            return [self._in(call) for call in value]
        if isinstance(value, Future):
            value = value.result()
        return value if self._transport is None else self._transport.decode(value)


@dataclass
class _Threads:
    """The workers of a group in this process, without the group."""

    name: str
    workers: list[_Worker] = field(default_factory=list)
    ended: bool = False

    def is_reachable(self) -> bool:
        return True

    def end(self, timeout_s: float, force: bool) -> Ended:
        """A thread can't be killed: what still runs after its time goes on, and is not waited for."""
        if not force and not self.ended:
            wait([worker.thread.submit(_nothing) for worker in self.workers], timeout_s)
        self.ended = True
        for worker in self.workers:
            worker.thread.shutdown(wait=False, cancel_futures=True)
        busy = [rank for rank, worker in enumerate(self.workers) if worker.busy]
        return Ended(tuple(busy), dict.fromkeys(busy, "a thread can't be killed, and it still runs a call"))


@dataclass(frozen=True)
class _Handle:
    """A worker, called past its group: `handle.method.remote(...)` gives a future of the result."""

    worker: _Worker

    def __getattr__(self, name: str) -> Any:
        return _Method(self.worker, name)


@dataclass(frozen=True)
class _Method:
    worker: _Worker
    name: str

    def remote(self, *args: Any, **kwargs: Any) -> Future[Any]:
        return self.worker.send(self.name, args, kwargs)


async def _listed(items: Any) -> list[Any]:
    return [item async for item in items]
