"""A group of workers on Ray, one actor per rank, called as a unit."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from raycrew.worker_groups._calls import Dispatch, MultiWorkerFuture, Recovery, send_to_actors
from raycrew.worker_groups._group.actors import Actors
from raycrew.worker_groups._group.base import WorkerGroup
from raycrew.worker_groups._group.handles import Contact, Directory, GroupHandle, RayRoute
from raycrew.worker_groups._group.life import CopiedLifecycle, Supervision, log_left
from raycrew.worker_groups._group.record import record_of_group
from raycrew.worker_groups._health import (
    Ended,
    Findings,
    Publication,
    Seen,
    SeenByRank,
    Span,
    Subjects,
    Wanted,
    Workers,
    examine,
    look_before_end,
    observed,
    sights_of,
)
from raycrew.worker_groups._ray import (
    ActorState,
    actor_states,
    check_session,
    current_session,
    runs_in_order,
    while_connected,
)
from raycrew.worker_groups._start import (
    HOOK,
    Started,
    for_the_way,
    next_generation,
    start_group,
    without_options,
)
from raycrew.worker_groups.balancing import ProcessUsage
from raycrew.worker_groups.errors import WorkerGroupError

logger = logging.getLogger(__name__)

_STATUS_S = 1.0


class RayWorkerGroup(WorkerGroup):
    """One actor per rank on the bundles of a cluster.

    When the constructor returns, `__init__` has returned on every rank. On any failure no actor is left and
    the bundles are free again.

    A group may be passed on to tasks and actors: such a copy can call the workers as they are at that moment,
    and tell of them. It comes without secrets, and the owner alone restarts workers and shuts the group down.
    While ranks are replaced, passing it on waits, for `init_timeout_s` at most; then it raises a
    `ResultTimeoutError`.
    What is to follow the group through restarts gets a `handle()`.

    Args:
        cluster: Where to place workers; a `RayVirtualCluster`, say.
        worker: A class, a `@ray.remote` class, a fully qualified name, or a `RayWorkerBuilder`.
        workers_per_node: Workers on each node, or one number per node; None for one worker per bundle.
        name_prefix: Name of the group; by default the worker class's.
        bundle_indices_list: Tied groups in rank order: `(node, [indices on it])`, or `[indices]` of them all.
        sharding_annotations: Named axes over the ranks.
        init: Keyword arguments of the worker's `__init__`, whatever they are called; or a function that gives
            those of a rank. It is called here with each rank's `RankInfo` once ranks are known, before any
            worker is told anything, and again for a worker that is replaced.
        env_vars: Variables set in each worker before its class is imported; or a function that gives those of
            a rank, called as that of `init` is, and at each new generation for every rank.
        launchers: Commands that start the workers' interpreters, such as `["nsys", "profile"]`, by pattern of
            the workers' names (those in `worker_metadata`); the first pattern that fits counts. Without an
            environment of its own, a worker so started runs in the driver's interpreter.
        secrets: Names of variables of this process that workers get too, and that show up nowhere.
        environments: Which Python workers run in: a provider, "auto" for installed ones, None for this.
        transport: What encodes arguments on their way: a transport, "auto" for an installed one.
        enable_gradient_compression: Passed to workers in `current_worker().communication`.
        async_communication: Passed to workers in `current_worker().communication`.
        enable_load_balancing: Whether there is a `balancer`, which gives each call or item to one worker.
        load_balancing_strategy: How it chooses: "round_robin", "least_outstanding", "least_loaded",
            "consistent_hash", or a function of the workers' loads and a key; see `LoadBalancer`.
        idempotent_methods: Methods that may run twice, should a worker be lost on the way.
        restart_on_failure: Whether dead workers are replaced once a call is seen to fail of them: by whoever
            takes its results; of a call of an idempotent method, by whoever waits for it, asks whether it is
            done, or has a function called then as well. While nobody does, a worker that died is not noticed.
            Calls of idempotent methods are then sent again, to all ranks that they were for; others, and
            streams, raise once the group is whole again.
        max_restarts: How often; after the first time with pauses of 1 s, 2 s, 4 s and so on between them.
            After an hour without a death it is counted anew.
        on_worker_failure: Called with the `WorkerFailureError` of each worker of whose death a call is seen
            to fail (seen as above), once and before it is replaced, in the thread that waited for the call,
            or that restarts the group. It is not told of dead workers that no call has failed of, though a
            restart and `restart_failed_workers` replace those as well. What it raises is logged.
        memory_limit: Most private memory of each worker's process, in bytes or as "8GB" or "8GiB"; what it
            shares with others does not count. A process that has more is ended, and its calls fail with a
            `WorkerMemoryError`. Its node's watch looks about ten times a second, so that what grows faster
            may get further. Should somebody end the watch, nobody looks until the group asks after its
            workers (`get_worker_status` and the like), which makes another one.
        diagnose: Whether the group makes a diagnosis of all ranks (see the method `diagnose`) where a call or
            its start fails or is late, or `detect_stuck_workers` finds somebody: the folder to make it in, or
            True for one among this machine's temporary files. The error says where it lies, as its
            `diagnosis`. That takes up to 5 s before the error is raised, and failures and time-outs may be
            what a program expects; so it is off by default. What happens within 10 s of the last one is told
            of in that; one call, or stall, is not told of again. Of those that this process makes so
            in one folder the first and the last 10 stay.
        init_timeout_s: Deadline of the whole start-up.
        ports_per_worker: Ports that each worker leases for itself, besides the group's rendezvous port.
        port_range: First and last port to lease from. While it starts, each worker needs two of them besides
            `ports_per_worker`, to meet at should it get rank 0; rank 0 keeps its two.
        progress: Whether to draw a progress bar; by default on a terminal.
        **init_kwargs: Further keyword arguments of the worker's `__init__`. One that is named nearly as an
            option is, and that only a `**kwargs` there would take, is refused.

    Raises:
        WorkerFailureError: A worker failed during start-up, or was late (`WorkerStartTimeoutError`).
        ValueError: The layout doesn't fit the cluster, or a resource can't be had.
        TypeError: Arguments don't fit `__init__`, or one is given twice.
        BundlesOccupiedError: Another group holds the bundles.
        BundlesLostError: Somebody removed a placement group of the cluster, perhaps during the start.
        NodeLostError: A node of the cluster is gone.

    Examples:
        >>> class Adder:
        ...     def __init__(self, start: int) -> None:
        ...         self.total = start
        ...
        ...     def add(self, amount: int) -> int:
        ...         self.total += amount
        ...         return self.total
        >>> with RayWorkerGroup(cluster, Adder, start=10) as group:
        ...     print(group.call(Adder.add, 5).get_results())
        ...     print(group.on(ranks=[1]).call(Adder.add, 1).get_results())
        [15, 15]
        [16]
    """

    def _start(self) -> Started:
        self._session, told = current_session(), Publication()
        started = start_group(self._spec, self._claim, self._note_end, self._check_connection, told)
        directory = Directory(self.name)
        self._crew: Actors = Actors(self.name, self._session, started.handles, started.facts, directory, told)
        self._in_order = runs_in_order(started.info.is_async, started.options[0].actor)
        self._is_torn = False
        self._supervision = Supervision(self.name, self._spec.options, self._life)
        return started

    def _note_places(self) -> None:
        super()._note_places()
        self._usage = self._make_usage()
        tied = self.worker_to_tied_group_index if len(self._tied_groups) < self.world_size else {}
        self._crew.publication.publish(record_of_group(self._spec, self._started, self._claim, tied))

    def _make_usage(self) -> ProcessUsage:
        places = zip(self._started.ranks, self._started.facts, strict=True)
        return ProcessUsage({info.rank: (facts.node_id, facts.pid) for info, facts in places})

    def __getstate__(self) -> dict[str, Any]:
        # No copy knows a new worker before that has heard of its generation.
        with self._life.copying(range(self.world_size), self._spec.options.init_timeout_s):
            return {**for_the_way(vars(self)), "_is_open": self._life.state in ("open", "restarting")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._session = state["_session"] or current_session()
        self._life = CopiedLifecycle(self.name, "open" if state["_is_open"] else "closed")
        self._in_use = None
        self._supervision = Supervision(self.name, self._spec.options, self._life)
        self._balancer = self._make_balancer() if state["_balancer"] else None
        self._usage = self._make_usage()

    def _check_connection(self) -> None:
        check_session(self._session, f"worker group {self.name!r}")

    def _resource_use(self) -> Mapping[int, float]:
        self._open()
        return self._usage()

    def _sights(self, workers: Workers, timeout_s: float) -> SeenByRank:
        return sights_of(workers.facts, timeout_s)

    def _answers(self, workers: Workers, ranks: Sequence[int], timeout_s: float) -> Mapping[int, ActorState]:
        states = actor_states([workers.handles[rank] for rank in ranks], timeout_s)
        return {rank: states[position] for position, rank in enumerate(ranks)}

    def _examine(
        self, subjects: Subjects, ranks: Sequence[int], wanted: Wanted, timeout_s: float
    ) -> Mapping[int, Findings]:
        return examine({rank: subjects.facts[rank] for rank in ranks}, subjects.prefixes, wanted, timeout_s)

    def restart_failed_workers(self) -> list[int]:
        """Replace dead workers: same rank, bundle and arguments, new process; returns their ranks.

        Where one rank of a tied group is dead, all of that tied group are replaced. The group gets a new
        generation and a new master port. Workers that live keep their state; they see the new generation in
        `current_worker()` once their running call is over. Where the class has an `on_generation(worker)`,
        this waits until it has returned on every rank, in any order among them; calls wait meanwhile. Without
        one, calls on the ranks that are replaced wait, those on others go on. While another thread restarts
        the group, this waits for it and has the same outcome.

        Raises:
            WorkerFailureError: A new worker failed or was late; this can be tried again. Or `on_generation`
                failed on a rank: dead ones can be restarted again, the living called again by
                `renew_rendezvous()`.
            WorkerGroupClosedError: The group was shut down, perhaps meanwhile; no new worker is left.
        """
        return self._life.restart(self._replace_dead)

    def _replace_dead(self, before: Callable[[], object] | None = None) -> list[int]:
        dead = self._dead()
        ranks = sorted(rank for tied in self._tied_groups if dead.intersection(tied) for rank in tied)
        if not ranks and (before is None or not self._is_torn):
            return []
        self._life.replacing(ranks)
        if before is not None:
            before()
        if ranks:
            logger.warning("%s: ranks %s are dead, restarting %s", self.name, sorted(dead), ranks)
            self._supervision.expect((r, self._started.facts[r].pid) for r in ranks if r not in dead)
        self._next_generation(ranks)
        return ranks

    def _dead(self) -> set[int]:
        """Ranks that are dead for Ray, or whose processes are gone; one may be known before the other."""
        self._open()
        workers = self._workers()
        states = self._answers(workers, range(self.world_size), _STATUS_S)
        sights = self._sights(workers, _STATUS_S)
        gone = {rank for rank, seen in sights.items() if isinstance(seen, Seen) and not seen.is_alive}
        return gone | {rank for rank, state in states.items() if state == "dead"}

    def _next_generation(self, ranks: Sequence[int]) -> None:
        # No call may come between a survivor's new place and its `on_generation`.
        is_heard = HOOK in self._started.info.methods
        self._life.replacing(range(self.world_size) if is_heard else ranks)
        self._end_strays()
        look_before_end(None)
        self._is_torn, began = True, time.monotonic()
        try:
            note, take = self._note_stray, self._take_generation
            next_generation(self._spec, self._claim, self._started, ranks, note, self._open, take)
            self._is_torn = False
        finally:
            self._crew.directory.publish(self._members)
            self._note_generation(ranks, began)

    def _note_generation(self, ranks: Sequence[int], began: float) -> None:
        if (observer := observed.by) is None:
            return
        what = f"restart of {sorted(ranks)}" if ranks else "new rendezvous"
        detail = {"generation": self.generation, "outcome": "failed" if self._is_torn else "ok"}
        now = time.monotonic()
        observer.spanned(Span(self.name, "restarts", what, "restart", began, now, detail))
        observer.counted("restarts", {"group": self.name}, len(ranks))

    def handle(self) -> GroupHandle:
        """See `WorkerGroup.handle`."""
        self._life.check_owner("handle")
        self._open()
        with self._life.sending(range(self.world_size), None), while_connected(self._check_connection):
            address, members = self._crew.directory.open(self._members)
        options = self._spec.options
        contact = Contact(
            address,
            without_options(self._started.info),
            self._spec.transport,
            self._in_order,
            options.load_balancing_strategy if options.enable_load_balancing else None,
            tuple(options.idempotent_methods),
            self._session,
        )
        return GroupHandle(RayRoute(contact, members))

    def _end_strays(self) -> None:
        left = {rank: why for stray in self._crew.end_strays() for rank, why in stray.left.items()}
        if left:
            who = "; ".join(f"rank {rank}: {why}" for rank, why in left.items())
            raise WorkerGroupError(f"{self.name}: workers of a failed restart have not ended yet ({who})")

    def _note_stray(self, ended: Ended) -> None:
        """Take in what became of new workers whose start failed."""
        ended = ended.renamed({position: rank for rank, position in enumerate(self._started.order)})
        log_left(self.name, ended)
        if ended.occupied:
            self._crew.strays.append(ended)

    def _take_generation(self, started: Started) -> None:
        self._started = started
        self._crew.handles, self._crew.facts = started.handles, started.facts
        self._note_places()

    def _deliver(self, dispatch: Dispatch, timeout: float | None) -> MultiWorkerFuture[Any, Any]:
        if not self._supervision.is_needed:
            return self._send_to_actors(dispatch, timeout)
        send_again = partial(self._send_to_actors, dispatch, None)
        recovery = self._supervision.recovery(dispatch.method, _Replaceable(self), send_again)
        return self._send_to_actors(dispatch, timeout, recovery)

    def _send_to_actors(
        self, dispatch: Dispatch, timeout: float | None, recovery: Recovery | None = None
    ) -> MultiWorkerFuture[Any, Any]:
        return send_to_actors(
            dispatch,
            self._started.handles,
            self._places,
            group_name=self.name,
            transport=self._spec.transport,
            timeout=timeout,
            in_order=self._in_order,
            keeper=self._in_use,
            session=self._session,
            recovery=recovery,
            diagnose=self._tell_diagnosis,
        )


class _Replaceable:
    """A group as its supervision sees it."""

    def __init__(self, group: RayWorkerGroup) -> None:
        self._group = group

    def replace_dead(self, before: Callable[[], object]) -> list[int]:
        """Replace dead workers as `restart_failed_workers` does, and to the end if nobody waits any more."""
        group = self._group
        return group._life.restart(lambda: group._replace_dead(before), apart=True)  # noqa: SLF001

    @property
    def is_torn(self) -> bool:
        """Whether the group's last new generation failed."""
        return self._group._is_torn  # noqa: SLF001

    def is_present(self, rank: int | None, pid: int | None) -> bool:
        """Whether a process is the one that a rank has now."""
        return rank is not None and self._group._started.facts[rank].pid == pid  # noqa: SLF001

    def status(self, rank: int) -> ActorState:
        """What a rank's worker is up to."""
        self._group._open()  # noqa: SLF001
        return actor_states([self._group._started.handles[rank]], _STATUS_S)[0]  # noqa: SLF001
