"""What groups on Ray and in one process have in common: how they are made, and what they tell."""

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, Literal

from raycrew.cluster_core import Claim, Cluster
from raycrew.worker_groups._calls import (
    Dispatch,
    GroupCalls,
    GroupShape,
    MultiWorkerFuture,
    Whereabouts,
    deadline_after,
    in_thread,
)
from raycrew.worker_groups._group.beside import Beside
from raycrew.worker_groups._group.handles import GroupHandle, Members
from raycrew.worker_groups._group.life import (
    ABANDONED_S,
    Ending,
    InUse,
    Lifecycle,
    Starting,
    claim_bundles,
    end_and_release,
    release_when_free,
    watch_over,
)
from raycrew.worker_groups._group.resizing import Resizing, check_min_workers
from raycrew.worker_groups._health import Ended, GroupDiagnosis, Workers, observed
from raycrew.worker_groups._start import (
    GroupFacts,
    GroupOptions,
    GroupSpec,
    Layout,
    RayWorkerBuilder,
    Started,
    bundles_of,
    check_launchers,
    forwarded_now,
    init_kwargs_of,
    transport_of,
    worker_aliases,
)
from raycrew.worker_groups._worker import pick_secrets
from raycrew.worker_groups.balancing import Balanced, LoadBalancer, WorkerLoad
from raycrew.worker_groups.errors import WorkerFailureError
from raycrew.worker_groups.protocols import ArgumentTransport, EnvironmentProvider
from raycrew.worker_groups.sharding import NamedSharding, RankInfo, TiedBundles, check_axes, plan_seats


class WorkerGroup(GroupFacts, GroupCalls, Balanced, Ending, GroupDiagnosis, Resizing):
    """A group of workers, wherever they run; see `RayWorkerGroup` for the arguments."""

    def __init__(
        self,
        /,
        cluster: Cluster,
        worker: Any,
        workers_per_node: int | Sequence[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: Sequence[TiedBundles | Sequence[int]] | None = None,
        *,
        sharding_annotations: NamedSharding | None = None,
        init: Mapping[str, Any] | Callable[[RankInfo], Mapping[str, Any]] | None = None,
        env_vars: Mapping[str, str] | Callable[[RankInfo], Mapping[str, str]] | None = None,
        secrets: Sequence[str] = (),
        launchers: Mapping[str, str | Sequence[str]] | None = None,
        environments: EnvironmentProvider | Literal["auto"] | None = None,
        transport: ArgumentTransport | Literal["auto"] | None = None,
        enable_gradient_compression: bool = False,
        async_communication: bool = False,
        enable_load_balancing: bool = False,
        load_balancing_strategy: str | Callable[[Sequence[WorkerLoad], Any], int] = "round_robin",
        idempotent_methods: Sequence[str] = (),
        restart_on_failure: bool = False,
        max_restarts: int | None = None,
        min_workers: int | None = None,
        standby: int = 0,
        preload: Sequence[str] = (),
        spare_bundles: int = 0,
        on_worker_failure: Callable[[WorkerFailureError], object] | None = None,
        memory_limit: int | str | None = None,
        diagnose: bool | str | PathLike[str] = False,
        init_timeout_s: float = 1200.0,
        ports_per_worker: int = 2,
        port_range: tuple[int, int] | None = None,
        progress: bool | None = None,
        **init_kwargs: Any,
    ) -> None:
        options = GroupOptions.among(locals())
        builder = worker if isinstance(worker, RayWorkerBuilder) else RayWorkerBuilder(worker)
        plan = plan_seats(bundles_of(cluster), workers_per_node, bundle_indices_list, options.n_spare)
        check_axes(sharding_annotations, len(plan.seats))
        check_min_workers(min_workers, plan, sharding_annotations)
        self._spec = GroupSpec(
            name=name_prefix or builder.fqn.rpartition(".")[2],
            builder=builder,
            cluster=cluster,
            plan=plan,
            options=options,
            init_kwargs=init_kwargs,
            forwarded=forwarded_now(),
            secrets=pick_secrets(secrets, os.environ),
            transport=transport_of(transport),
        )
        init_kwargs_of(self._spec)
        check_launchers(options.launchers, worker_aliases(self._spec.name, plan))
        balancer = self._make_balancer()
        self._balancer = balancer if enable_load_balancing else None
        self.cluster = cluster
        self._life: Lifecycle = Lifecycle(self._spec.name)
        self._claim: Claim = claim_bundles(cluster, plan.indices, self._spec.name)
        try:
            self._started: Started = self._start()
        except BaseException:
            release_when_free(self._ended or Ended(), self._claim)
            raise
        self._in_use: InUse | None = (in_use := InUse())
        give_back = partial(end_and_release, self._crew, ABANDONED_S, force=False)
        self._unwatch = watch_over(in_use, f"worker group {self.name!r}", give_back)
        self._take_layout(Layout(self._spec, self._claim, self._started))
        self._begin_diagnoses(diagnose)
        self._life.opened()
        if (observer := observed.by) is not None:
            for span in self._started.report.spans(time.monotonic()):
                observer.spanned(span)

    @Starting(__init__)
    async def start(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as a class method's
        """Make a group without blocking the event loop: `await RayWorkerGroup.start(cluster, Policy)`.

        See the class for arguments and errors. Being cancelled gives the start up, and waits until no worker
        is left.
        """
        return await in_thread(lambda: cls(*args, **kwargs), undo=lambda group: group.shutdown(force=True))

    def _take_layout(self, layout: Layout) -> None:
        """From now on these are the workers, on these bundles."""
        placements, started = layout.placements, layout.started  # before anything is another
        places = zip(started.ranks, started.facts, strict=True)
        self._placements = placements
        self._places = {info.rank: Whereabouts(layout.spec.name, info, facts) for info, facts in places}
        self._spec, self._claim, self._started = layout
        self._crew.claim = layout.claim
        self._tied_groups = layout.tied_groups
        self.sharding_annotations = layout.spec.options.sharding_annotations
        n, axes = len(started.ranks), self.sharding_annotations
        self._shape = GroupShape(started.info, n, self._tied_groups, axes)

    @abstractmethod
    def _start(self) -> Started:
        """Start the workers, the `_crew` from then on; when it raises, `_note_end` was told of them."""

    @abstractmethod
    def _next_generation(self, ranks: Sequence[int]) -> None:
        """Replace the workers of some ranks, perhaps of none, and give the whole group a new generation."""

    @abstractmethod
    def _resource_use(self) -> Mapping[int, float]:
        """CPU use by rank, as far as it is known."""

    def _make_balancer(self) -> LoadBalancer:
        options = self._spec.options
        return LoadBalancer(
            self,
            options.load_balancing_strategy,
            idempotent_methods=options.idempotent_methods,
            usage=lambda: self._resource_use(),  # there once the workers are
            absent=None if options.min_workers is None else lambda: self.absent_ranks,
        )

    @abstractmethod
    def handle(self) -> GroupHandle:
        """A handle for those who call the group and do not own it, in any task or actor of the cluster.

        It follows the group through restarts, where a pickled copy of the group has the workers of its moment
        alone. The first one starts a small actor that knows who the members are, and ends with the group.

        Raises:
            WorkerGroupClosedError: The group was shut down.
            WorkerGroupError: This is a copy of the group.
        """

    def _members(self) -> Members:
        started = self._started
        tied, sharding = self._tied_groups, self.sharding_annotations
        return Members(started.handles, started.ranks, started.facts, tied, sharding)

    def __repr__(self) -> str:
        workers = "1 worker" if self.world_size == 1 else f"{self.world_size} workers"
        state = workers if self._life.state in ("open", "restarting") else "shut down"
        return f"{type(self).__name__}({self.name!r}, {self._started.info.name}, {state})"

    def places_beside(self) -> Beside:
        """The bundles of this group in rank order, as a cluster for processes beside its workers.

        They take nothing of the bundles, and have to end before this group does.

        Raises:
            WorkerGroupClosedError: The group was shut down.
        """
        self._open()
        return Beside(self.cluster, self._claim, self._started.order)

    def renew_rendezvous(self) -> int:
        """Give the group a new generation with a new master port, its workers staying; returns its number.

        For a group whose processes have to meet anew although none is dead, after a collective operation that
        failed, say. Workers hear of it as of a restart: see `restart_failed_workers`.

        Raises:
            WorkerFailureError: A worker failed or was late in its `on_generation`; this can be tried again.
            WorkerGroupClosedError: The group was shut down, perhaps meanwhile.
        """

        def renew() -> list[int]:
            self._next_generation(())
            return []

        self._life.restart(renew, "renew_rendezvous")
        return self.generation

    def _open(self) -> GroupShape:
        self._life.check()
        self._check_connection()
        absent = self.absent_ranks
        return replace(self._shape, absent=frozenset(absent)) if absent else self._shape

    def _workers(self) -> Workers:
        started = self._started
        return Workers(started.facts, started.handles)

    def _check_connection(self) -> None:
        """Raise a `WorkerGroupClosedError` if the workers can't be reached any more."""

    def _send(self, dispatch: Dispatch, timeout: float | None) -> MultiWorkerFuture[Any, Any]:
        deadline_after(timeout)  # what is no time is refused before anything is sent
        if dispatch.join is not None:
            dispatch = replace(dispatch, join=replace(dispatch.join, transport=self._spec.transport))
        with self._life.sending([send.rank for send in dispatch.sends], timeout):
            return self._deliver(dispatch, timeout)
