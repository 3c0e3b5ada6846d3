"""A group of workers on Ray, one actor per rank, called as a unit."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from raycrew.cluster_core import Session
from raycrew.worker_groups._calls import Dispatch, MultiWorkerFuture, Recovery, send_to_actors
from raycrew.worker_groups._group.actors import Actors
from raycrew.worker_groups._group.handles import Contact, Directory, GroupHandle, RayRoute
from raycrew.worker_groups._group.life import CopiedLifecycle, Supervision, claim_places
from raycrew.worker_groups._group.renewal import RenewedGroup, Replaceable
from raycrew.worker_groups._group.reserve import Reserve
from raycrew.worker_groups._health import (
    Findings,
    Publication,
    SeenByRank,
    Subjects,
    Wanted,
    Workers,
    examine,
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
    Layout,
    Started,
    for_the_way,
    start_group,
    without_options,
)

logger = logging.getLogger(__name__)

_STATUS_S = 1.0


class RayWorkerGroup(RenewedGroup):
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
        max_restarts: How often, 3 times for None; after the first time with pauses of 1 s, 2 s, 4 s and so on
            between them. After an hour without a death it is counted anew. With `restart_on_failure` alone.
        min_workers: With how many workers the group goes on while the rest is replaced; for ranks that do not
            need each other, and with `restart_on_failure`. A call that is the same for all ranks, and a
            balancer, then leave out those that are `absent_ranks` at the moment; calls that name them, or
            give each rank its own part, wait. A call that failed of a death raises without waiting until the
            rank was replaced, unless it is sent again as one of `idempotent_methods`; a balancer's items go
            to another worker at once. Without it, or with fewer left, all wait.
        standby: How many workers stand by: each has imported `preload` on a bundle of its own, and takes over
            a rank whose worker has died, in a fraction of a start's time. It is then told what a new worker
            is told: rank, variables, secrets, class, arguments. The rank has another bundle from then on,
            and on the one that it had somebody else is prepared to stand by. Such bundles are the first that
            are free besides; where nothing says who is where, the cluster's last ones. No ranks may be tied.
        preload: Modules that those import before there is a rank for them, such as "torch". What a module
            reads of its environment while it is imported is that of the process's start.
        spare_bundles: Further bundles that are kept free for ranks whose node is lost; those on which workers
            stand by are, too. They hold as much as each of the ranks' own.
        on_worker_failure: Called with the `WorkerFailureError` of each worker of whose death a call is seen
            to fail (seen as above), once and before it is replaced, in the thread that waited for the call,
            or that restarts the group. It is not told of dead workers that no call has failed of, though a
            restart and `restart_failed_workers` replace those as well. What it raises is logged.
        memory_limit: Most private memory of each worker's process, in bytes or as "8GB" or "8GiB"; what it
            shares with others does not count. A process that has more is ended, and its calls fail with a
            `WorkerMemoryError`. Its node's watch looks ten times a second, and more often the closer it is
            to that; what grows by gigabytes a second may get further. Should somebody end the watch, nobody
            looks until the group asks after its workers (`get_worker_status` and the like), which makes
            another one.
        diagnose: Whether the group makes a diagnosis of all ranks (see the method `diagnose`) where a call or
            its start fails or is late, or `detect_stuck_workers` finds somebody: the folder to make it in, or
            True for one among this machine's temporary files. The error says where it lies, as its
            `diagnosis`. That takes up to 5 s before the error is raised, and failures and time-outs may be
            what a program expects; so it is off by default. What happens within 10 s of the last one is told
            of in that; one call, or stall, is not told of again. Of those that this process makes so
            in one folder the first and the last 10 stay.
        init_timeout_s: Deadline of the whole start-up, and once more of the start of those that stand by.
        ports_per_worker: Ports that each worker leases for itself, besides the group's rendezvous port.
        port_range: First and last port to lease from. While it starts, each worker needs two of them besides
            `ports_per_worker`, to meet at should it get rank 0; rank 0, and who stands by, keeps its two.
        progress: Whether to draw a progress bar; by default on a terminal.
        **init_kwargs: Further keyword arguments of the worker's `__init__`. One that is named nearly as an
            option is, and that only a `**kwargs` there would take, is refused.

    Raises:
        WorkerFailureError: A worker failed during start-up, or was late (`WorkerStartTimeoutError`).
        ValueError: The layout doesn't fit the cluster, or a resource can't be had.
        TypeError: Arguments don't fit `__init__`, or one is given twice.
        UnknownMethodError: The class has no method of a name in `idempotent_methods`.
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
        places = claim_places(self._spec, self._claim)
        reserve = Reserve(self.name, self._session, places, self._spec.options.standby)
        try:
            started = start_group(self._spec, self._claim, self._note_end, self._check_connection, told)
        except BaseException:
            reserve.end(0)
            raise
        crew = (self.name, self._session, started.handles, started.facts, self._claim)
        self._crew: Actors = Actors(*crew, Directory(self.name), told, reserve=reserve)
        try:
            reserve.prepare(Layout(self._spec, self._claim, started))
        except BaseException:
            with Session.until_set(None):
                self._note_end(self._crew.end(0.0, force=True))
            raise
        self._in_order = runs_in_order(started.info.is_async, started.options[0].actor)
        self._is_torn = False
        self._supervision = Supervision(self.name, self._spec.options, self._life)
        return started

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
        processes = {rank: subjects.processes[rank] for rank in ranks}
        return examine(processes, subjects.prefixes, wanted, timeout_s)

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

    def _deliver(self, dispatch: Dispatch, timeout: float | None) -> MultiWorkerFuture[Any, Any]:
        if not self._supervision.is_needed:
            return self._send_to_actors(dispatch, timeout)
        send_again = partial(self._send_again, dispatch)
        recovery = self._supervision.recovery(dispatch.method, Replaceable(self), send_again)
        return self._send_to_actors(dispatch, timeout, recovery)

    def _send_again(self, dispatch: Dispatch) -> MultiWorkerFuture[Any, Any]:
        with self._life.sending(
            [send.rank for send in dispatch.sends], None
        ):  # the next restart may have begun
            return self._send_to_actors(replace(dispatch, is_again=True), None)

    def _send_to_actors(
        self, dispatch: Dispatch, timeout: float | None, recovery: Recovery | None = None
    ) -> MultiWorkerFuture[Any, Any]:
        dispatch.check_size(self.world_size, self.name)
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
