"""For tests: a worker group in this process, without Ray.

with InProcessGroup(FakeCluster([2]), Policy, scale=10) as group:
    assert group.call(Policy.step, 4).get_results() == [40, 40]

And what workers on Ray have left behind: `worker_processes`.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, cast

from raycrew.worker_groups._calls import (
    Dispatch,
    MultiWorkerFuture,
    Whereabouts,
    refuse_stream,
    start_timeout,
)
from raycrew.worker_groups._group import GroupHandle, LocalRoute, Spare, WorkerGroup, claim_more
from raycrew.worker_groups._health import (
    Findings,
    Seen,
    SeenByRank,
    Subjects,
    Wanted,
    Workers,
    WorkerStatus,
    checked_patience,
    observed,
)
from raycrew.worker_groups._on_nodes import on_page
from raycrew.worker_groups._ray import ActorState, unwrap_actor_class
from raycrew.worker_groups._start import (
    HOOK,
    Handle,
    JoinedClaim,
    Layout,
    Started,
    StartupReport,
    Stopwatch,
    check_arguments,
    check_methods,
    init_kwargs_of,
)
from raycrew.worker_groups._worker import (
    ClassInfo,
    as_current,
    be_current,
    describe_class,
    load_class,
)
from raycrew.worker_groups.errors import ResultTimeoutError
from raycrew.worker_groups.sharding import (
    RankInfo,
    Seat,
    WorkerFacts,
    assign_ranks,
    final_indices,
    rank_order,
)
from raycrew.worker_groups.testing._futures import InProcessFuture
from raycrew.worker_groups.testing._processes import worker_processes
from raycrew.worker_groups.testing._threads import ThreadHandle, Threads, WorkerThread, nothing

__all__ = ["InProcessFuture", "InProcessGroup", "worker_processes"]


class InProcessGroup(WorkerGroup):
    """A worker group whose workers are objects of this process, each with a thread of its own.

    It is made, asked, called and ended as a `RayWorkerGroup` is, with the same checks and the same errors;
    calls of one worker run one after the other, those of several at the same time. What needs processes of
    their own is accepted and does nothing: workers share this process's environment and interpreter, so
    `env_vars`, `secrets`, `environments` and `RANK` and the like are not set (`current_worker()` tells all of
    it), and none is ever lost, so that nobody stands by. `port_range`, `memory_limit` and `progress` do
    nothing either. Workers have no heartbeat and no memory of their own, so of these nothing is told; one
    that is stuck is found by its call alone. What they print is this process's output, of which `logs` tells
    nothing. `tick()` counts in the thread that runs the call and in what has its
    context, as `asyncio.to_thread` has; in other threads that a call starts it does nothing.

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
        info = describe_class(cls, options, _requests(spec.plan.seats))
        whole = not callable(spec.options.init)
        for own in info.configured:
            check_arguments(spec, info, {**init_kwargs_of(spec), **own.init_kwargs}, whole=whole)
        check_methods(info, spec.options.idempotent_methods)
        report = StartupReport(spec.name, environment_s=watch.lap())
        facts = [self._facts(bundle.index) for bundle in self._claim.bundles]
        indices = final_indices(self._claim, facts)
        order = rank_order(spec.plan, indices)
        ranks = assign_ranks(order, facts, indices, spec.name)
        here = [facts[position] for position in order]
        kwargs = self._init_kwargs(info, order, ranks)
        self._crew: Threads = Threads(spec.name, self._claim)
        self._crew.workers = self._threads(ranks, here)
        try:
            init_s = self._construct(self._crew.workers, cls, ranks, here, kwargs)
            self._tell_generation(info, ranks, here)
        except BaseException:
            self._crew.end(0.0, force=True)
            raise
        for rank, seconds in enumerate(init_s):
            report.workers[rank] = {"placement": 0.0, "process": 0.0, "import": 0.0, "init": seconds}
        report.total_s = watch.total_s
        handles = [cast("Handle", ThreadHandle(worker)) for worker in self._crew.workers]
        return Started(handles, ranks, here, order, info, [], report)

    def _threads(self, ranks: Sequence[RankInfo], facts: Sequence[WorkerFacts]) -> list[WorkerThread]:
        wishes, transport = self._spec.options.communication, self._spec.transport
        pairs = zip(ranks, facts, strict=True)
        return [WorkerThread(as_current(rank, fact, wishes), transport) for rank, fact in pairs]

    def _construct(
        self,
        workers: Sequence[WorkerThread],
        cls: type,
        ranks: Sequence[RankInfo],
        facts: Sequence[WorkerFacts],
        kwargs: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        """Construct workers; gives the seconds of each."""
        args, name = self._spec.builder.args, self._spec.name
        calls = [worker.start(cls, args, own) for worker, own in zip(workers, kwargs, strict=True)]
        known = zip(ranks, facts, strict=True)
        places = {info.rank: Whereabouts(name, info, fact) for info, fact in known}
        return self._await_start("__init__", calls, places)

    def _init_kwargs(
        self, info: ClassInfo, order: Sequence[int], ranks: Sequence[RankInfo]
    ) -> list[dict[str, Any]]:
        """Keyword arguments of `__init__` of some ranks."""
        found = []
        for rank, position in zip(ranks, order, strict=True):
            found.append({**init_kwargs_of(self._spec, rank), **info.configured[position].init_kwargs})
            check_arguments(self._spec, info, found[-1], whole=True)
        return found

    def _await_start(
        self, method: str, calls: Sequence[Future[Any]], places: Mapping[int, Whereabouts]
    ) -> list[Any]:
        name, timeout_s = self._spec.name, self._spec.options.init_timeout_s
        starting = InProcessFuture(calls, list(places), method=method, group_name=name, places=places)
        try:
            return starting.get_results(timeout=timeout_s)  # type: ignore[no-any-return]
        except ResultTimeoutError as late:
            others = [str(places[rank]) for rank in late.pending[1:]]
            stage = f"its {method} did not return"
            raise start_timeout(places[late.pending[0]], stage, others, timeout_s, method=method) from None

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

    def _sights(self, workers: Workers, timeout_s: float) -> SeenByRank:  # noqa: ARG002 - nobody has to be asked
        pages = [cast("Any", handle).worker.page for handle in workers.handles]
        return {rank: Seen.of({"is_alive": True, **on_page(page)}) for rank, page in enumerate(pages)}

    def _answers(
        self,
        workers: Workers,  # noqa: ARG002 - none is ever replaced
        ranks: Sequence[int],
        timeout_s: float,
    ) -> Mapping[int, ActorState]:
        asked = {rank: self._crew.workers[rank].thread.submit(nothing) for rank in ranks}
        done = wait(asked.values(), timeout_s).done
        return {rank: "ready" if call in done else "busy" for rank, call in asked.items()}

    def _examine(
        self,
        subjects: Subjects,  # noqa: ARG002 - as of a group on Ray
        ranks: Sequence[int],
        wanted: Wanted,
        timeout_s: float,
    ) -> Mapping[int, Findings]:
        sights = self._sights(self._workers(), timeout_s)
        return {rank: self._crew.workers[rank].found(sights[rank], wanted) for rank in ranks}

    def restart_failed_workers(self) -> list[int]:
        """Nothing, as none is ever lost."""
        self._open()
        return self._life.restart(list)

    @property
    def spares(self) -> list[Spare]:
        """Nothing, for the same reason."""
        return []

    def get_standby_status(self, timeout: float = 1.0) -> dict[int, WorkerStatus]:
        """Nothing, as nobody stands by."""
        checked_patience(timeout)
        self._open()
        return {}

    def _next_generation(self, ranks: Sequence[int]) -> None:  # noqa: ARG002 - never any
        self._life.replacing(range(self.world_size))
        layout = Layout(self._spec, self._claim, self._started)
        self._renew(self._succeeding(layout, layout.started.facts), self._crew.workers)

    def _succeeding(self, layout: Layout, facts: Sequence[WorkerFacts]) -> Layout:
        """The next generation, of workers of which this is known in rank order, at another port."""
        old, indices = layout.started, [bundle.index for bundle in layout.claim.bundles]
        order = [*old.order, *range(len(old.order), len(facts))]
        at = dict(zip(order, facts, strict=True))
        by_position = [at[position] for position in range(len(order))]
        ranks = assign_ranks(order, by_position, indices, layout.spec.name, old.ranks[0].generation + 1)
        port = self.cluster.rendezvous(old.ranks[0].bundle_index).ports[0]
        ranks = [replace(info, master_port=port) for info in ranks]
        return layout._replace(started=replace(old, ranks=ranks, facts=list(facts), order=order))

    def _renew(self, layout: Layout, workers: list[WorkerThread]) -> None:
        started = layout.started
        started.handles = [cast("Handle", ThreadHandle(worker)) for worker in workers]
        self._crew.workers = workers
        self._take_layout(layout)
        for worker, info, facts in zip(workers, started.ranks, started.facts, strict=True):
            worker.thread.submit(be_current, as_current(info, facts, self._spec.options.communication))
        self._tell_generation(started.info, started.ranks, started.facts)

    def _grow(self, n: int) -> None:
        before, workers = self.world_size, list[WorkerThread]()
        more = claim_more(self.cluster, self._claim, n - before, self.name)
        try:
            layout = Layout(self._spec, self._claim, self._started).with_bundles(more)
            cls, options = _class_of(self._spec.builder.worker)
            own = describe_class(cls, options, _requests(layout.spec.plan.seats[before:])).configured
            known = layout.started.info
            info = replace(known, configured=(*known.configured, *own))
            facts = [*layout.started.facts, *(self._facts(bundle.index) for bundle in more.bundles)]
            layout = self._succeeding(layout, facts)
            layout.started.info, ranks = info, layout.started.ranks[before:]
            kwargs = self._init_kwargs(info, range(before, n), ranks)
            workers = self._threads(ranks, facts[before:])
            self._construct(workers, cls, ranks, facts[before:], kwargs)
            self._life.replacing(range(n))
        except BaseException:
            Threads(self.name, more, workers).end(0.0, force=True)
            more.release()
            raise
        self._renew(layout, [*self._crew.workers, *workers])

    def _shrink(self, n: int, cleanup_method: str | None, timeout_s: float) -> tuple[int, ...]:
        self._life.replacing(range(self.world_size))
        before = Layout(self._spec, self._claim, self._started)
        bundles = JoinedClaim.of(before.claim).at(before.started.order[n:])
        leaving, layout = Threads(self.name, bundles, self._crew.workers[n:]), before.first(n)
        try:
            self._renew(self._succeeding(layout, layout.started.facts), self._crew.workers[:n])
        finally:
            self._life.replacing(())
            if cleanup_method is not None:
                leaving.say(cleanup_method)
            ended = leaving.end(timeout_s, force=False)
            bundles.release()
        return tuple(n + position for position in ended.late)

    def _tell_generation(
        self, info: ClassInfo, ranks: Sequence[RankInfo], facts: Sequence[WorkerFacts]
    ) -> None:
        if HOOK not in info.methods:
            return
        told = zip(self._crew.workers, ranks, facts, strict=True)
        options = self._spec.options
        calls = [w.send(HOOK, [as_current(r, f, options.communication)], {}) for w, r, f in told]
        places = {
            rank.rank: Whereabouts(self._spec.name, rank, f) for rank, f in zip(ranks, facts, strict=True)
        }
        self._await_start(HOOK, calls, places)

    def handle(self) -> GroupHandle:
        """See `RayWorkerGroup.handle`; it stays in this process, as its group does."""
        self._open()
        options = self._spec.options
        strategy = options.load_balancing_strategy if options.enable_load_balancing else None
        calls = (self._open, self._members, self._send)
        return GroupHandle(
            LocalRoute(self.name, self._started.info, strategy, options.idempotent_methods, *calls)
        )

    def __reduce__(self) -> str:
        raise TypeError(f"{self.name!r} is a group of threads of this process, and can't be pickled")

    def _resource_use(self) -> Mapping[int, float]:
        return {}

    def _deliver(self, dispatch: Dispatch, timeout: float | None) -> MultiWorkerFuture[Any, Any]:
        for send in dispatch.sends:
            for value in (*send.args, *send.kwargs.values()):
                refuse_stream(value)
        dispatch.check_size(self.world_size, self.name)
        name, at = dispatch.method.name, time.monotonic()
        calls = [self._crew.workers[s.rank].send(name, s.args, s.kwargs) for s in dispatch.sends]
        ranks = [send.rank for send in dispatch.sends]
        if (observer := observed.by) is not None:
            observer.sent(at, self.name, name, ranks, [call.call_id for call in calls])  # type: ignore[attr-defined]
        return InProcessFuture(
            calls,
            ranks,
            dispatch.return_from,
            dispatch.respect_tied_workers,
            method=name,
            group_name=self.name,
            places=self._places,
            timeout=timeout,
            is_stream="generator" in dispatch.method.kind,
            keeper=self._in_use,
            join=dispatch.join,
            diagnose=self._tell_diagnosis,
        )


def _requests(seats: Sequence[Seat]) -> list[dict[str, Any]]:
    """What `configure_worker` is told, where nothing is a device."""
    return [{"num_gpus": 0, "bundle_indices": seat.tied_bundles, "num_gpus_per_node": 0} for seat in seats]


def _class_of(worker: Any) -> tuple[type, dict[str, Any]]:
    return load_class(worker) if isinstance(worker, str) else unwrap_actor_class(worker)
