"""For tests: a worker group in this process, without Ray.

with InProcessGroup(FakeCluster([2]), Policy, scale=10) as group:
    assert group.call(Policy.step, 4).get_results() == [40, 40]
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from raycrew.cluster_core import Cluster, Placement
from raycrew.worker_groups._calls import GroupCalls
from raycrew.worker_groups._dispatch import Dispatch, GroupShape, Send
from raycrew.worker_groups._failures import Whereabouts, failure
from raycrew.worker_groups._futures import MultiWorkerFuture, refuse_stream
from raycrew.worker_groups._ranks import (
    RankInfo,
    TiedBundles,
    WorkerFacts,
    assign_ranks,
    plan_seats,
    rank_order,
)
from raycrew.worker_groups._ray_compat import unwrap_actor_class
from raycrew.worker_groups._shell import CommunicationOptions, as_current, be_current
from raycrew.worker_groups._spec import RayWorkerBuilder, check_init
from raycrew.worker_groups._waiting import left
from raycrew.worker_groups._worker_class import describe_class, load_class
from raycrew.worker_groups.errors import (
    ResultTimeoutError,
    WorkerFailureError,
    WorkerGroupClosedError,
    WorkerGroupError,
    combine,
)
from raycrew.worker_groups.sharding import NamedSharding

__all__ = ["InProcessFuture", "InProcessGroup"]


class InProcessFuture(MultiWorkerFuture[Any]):
    """A `MultiWorkerFuture` of this process: a list of `concurrent.futures.Future`, not for `ray.get`."""

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

    async def _results_async(self) -> list[Any]:
        return await asyncio.to_thread(self.get_results)

    def _done_in_turn(self, deadline: float | None) -> Iterator[tuple[int, Any]]:
        rank_of = dict(zip(self, self.called_workers, strict=True))
        waiting = set(self)
        while waiting:
            done, waiting = wait(waiting, timeout=left(deadline), return_when=FIRST_COMPLETED)
            if not done:
                pending = sorted(rank_of[call] for call in waiting)
                raise ResultTimeoutError(
                    f"{self.group_name}.{self.method}: ranks {pending} are late", pending
                )
            failed = {rank_of[call]: call.exception() for call in done if call.exception()}
            if failed:
                raise combine([self._failure(rank, error) for rank, error in sorted(failed.items()) if error])
            yield from [(rank_of[call], call.result()) for call in done]

    def _failure(self, rank: int, error: BaseException) -> WorkerFailureError:
        return failure(self._places[rank], error, self.method, elapsed_s=time.monotonic() - self._sent_at)


class InProcessGroup(GroupCalls):
    """A worker group whose workers are objects of this process, each with a thread of its own.

    It is called as a `RayWorkerGroup` is: same dispatch, same checks, same errors; calls of one worker run
    one after the other, those of several at the same time. Workers share this process's environment, so
    `RANK` and the like are not set; `current_worker()` tells the same.

    Args:
        cluster: Any `Cluster`; a `FakeCluster` needs no Ray.
        worker: A class, a `@ray.remote` class, an importable name, or a `RayWorkerBuilder`.
        workers_per_node: See `RayWorkerGroup`.
        name_prefix: See `RayWorkerGroup`.
        bundle_indices_list: See `RayWorkerGroup`.
        sharding_annotations: See `RayWorkerGroup`.
        **init_kwargs: Further keyword arguments of the worker's `__init__`.

    Raises:
        WorkerFailureError: An `__init__` raised.
        TypeError: Arguments don't fit `__init__`.
        ValueError: The layout doesn't fit the cluster.
    """

    def __init__(
        self,
        cluster: Cluster,
        worker: Any,
        workers_per_node: int | Sequence[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: Sequence[TiedBundles | Sequence[int]] | None = None,
        *,
        sharding_annotations: NamedSharding | None = None,
        **init_kwargs: Any,
    ) -> None:
        builder = worker if isinstance(worker, RayWorkerBuilder) else RayWorkerBuilder(worker)
        plan = plan_seats(cluster.bundles, workers_per_node, bundle_indices_list)
        cls, options = _class_of(builder.worker)
        self.name = name_prefix or cls.__name__
        requests = [
            {"num_gpus": 0, "bundle_indices": s.tied_bundles, "num_gpus_per_node": 0} for s in plan.seats
        ]
        info = describe_class(cls, options, requests)
        kwargs = [{**builder.kwargs, **init_kwargs, **own.init_kwargs} for own in info.configured]
        for each in kwargs:
            check_init(info, builder.args, each)
        self._shape = GroupShape(info, len(plan.seats), plan.tied_groups, sharding_annotations)
        self._closed = False
        self._claim = cluster.claim(plan.indices, self.name)
        bundles = self._claim.bundles
        facts = [WorkerFacts(b.node_id, b.node_address, threading.get_native_id()) for b in bundles]
        order = rank_order(plan, facts)
        self.ranks: list[RankInfo] = assign_ranks(order, facts, [b.index for b in bundles], self.name)
        self._places = {
            info.rank: Whereabouts(self.name, info, facts[p])
            for info, p in zip(self.ranks, order, strict=True)
        }
        self._workers = [
            _Worker(rank, fact, self.name)
            for rank, fact in zip(self.ranks, (facts[p] for p in order), strict=True)
        ]
        starting = [w.start(cls, builder.args, kwargs[p]) for w, p in zip(self._workers, order, strict=True)]
        try:
            self._future(starting, "__init__", range(len(starting))).get_results()
        except BaseException:
            self.shutdown(force=True)
            raise

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self.ranks)

    @property
    def tied_workers_groups(self) -> list[list[int]]:
        """Ranks of each tied group, leader first."""
        return [list(group) for group in self._shape.tied_groups]

    @property
    def placements(self) -> list[Placement]:
        """Which bundle each rank occupies."""
        return [Placement(info.rank, info.bundle_index) for info in self.ranks]

    @property
    def instances(self) -> list[Any]:
        """The workers themselves, in rank order, to look into."""
        return [worker.instance for worker in self._workers]

    def shutdown(self, cleanup_method: str | None = None, timeout: float = 30.0, force: bool = False) -> bool:
        """End the group; a running call is waited for unless `force`. Idempotent."""
        if self._closed:
            return True
        clean = True
        if cleanup_method is not None and not force:
            try:
                self.on(timeout=timeout).call(cleanup_method).get_results()
            except WorkerGroupError:
                clean = False
        self._closed = True
        for worker in self._workers:
            worker.thread.shutdown(wait=not force, cancel_futures=True)
        self._claim.release()
        return clean

    def _open(self) -> GroupShape:
        if self._closed:
            raise WorkerGroupClosedError(f"worker group {self.name!r} was shut down")
        return self._shape

    def _send(self, dispatch: Dispatch, timeout: float | None) -> MultiWorkerFuture[Any]:
        for send in dispatch.sends:
            for value in (*send.args, *send.kwargs.values()):
                refuse_stream(value)
        calls = [self._workers[send.rank].send(dispatch.method.name, send) for send in dispatch.sends]
        return self._future(
            calls,
            dispatch.method.name,
            [send.rank for send in dispatch.sends],
            return_from_workers=dispatch.return_from,
            respect_tied_workers=dispatch.respect_tied_workers,
            timeout=timeout,
            is_stream="generator" in dispatch.method.kind,
        )

    def _future(
        self, calls: Sequence[Future[Any]], method: str, ranks: Sequence[int], **rest: Any
    ) -> InProcessFuture:
        return InProcessFuture(calls, ranks, method=method, group_name=self.name, places=self._places, **rest)


def _class_of(worker: Any) -> tuple[type, dict[str, Any]]:
    return load_class(worker) if isinstance(worker, str) else unwrap_actor_class(worker)


class _Worker:
    """One worker with its thread."""

    def __init__(self, info: RankInfo, facts: WorkerFacts, group_name: str) -> None:
        self.instance: Any = None
        self._current = as_current(info, facts, CommunicationOptions())
        self.thread = ThreadPoolExecutor(1, f"{group_name}-{info.rank}", be_current, (self._current,))

    def start(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        def construct() -> None:
            self.instance = cls(*args, **kwargs)

        return self.thread.submit(construct)

    def send(self, name: str, send: Send) -> Future[Any]:
        return self.thread.submit(self._run, getattr(self.instance, name), send)

    def _run(self, method: Callable[..., Any], send: Send) -> Any:
        result = method(*map(_received, send.args), **{k: _received(v) for k, v in send.kwargs.items()})
        if inspect.iscoroutine(result):
            return asyncio.run(result)
        if hasattr(result, "__aiter__"):
            return asyncio.run(_listed(result))
        return list(result) if hasattr(result, "send") else result


def _received(value: Any) -> Any:
    if isinstance(value, MultiWorkerFuture):
        return [call.result() for call in value]
    return value.result() if isinstance(value, Future) else value


async def _listed(items: Any) -> list[Any]:
    return [item async for item in items]
