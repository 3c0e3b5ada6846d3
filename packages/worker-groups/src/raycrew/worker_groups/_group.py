"""A group of workers, one actor per rank, called as a unit."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ray.exceptions import RayError
from rich.console import Console
from rich.table import Table

from raycrew.cluster_core import Bundle, Cluster, Placement
from raycrew.worker_groups._calls import GroupCalls
from raycrew.worker_groups._dispatch import Dispatch, GroupShape
from raycrew.worker_groups._failures import Whereabouts
from raycrew.worker_groups._futures import MultiWorkerFuture
from raycrew.worker_groups._options import pick_secrets
from raycrew.worker_groups._plugins import transport_of
from raycrew.worker_groups._ranks import RankInfo, TiedBundles, plan_seats
from raycrew.worker_groups._ray_compat import (
    WorkerStatus,
    await_end,
    connection,
    end_actors,
    request_exit,
    runs_in_order,
    worker_status,
)
from raycrew.worker_groups._report import StartupReport
from raycrew.worker_groups._sending import send_to_actors
from raycrew.worker_groups._shell import CommunicationOptions
from raycrew.worker_groups._spec import GroupSpec, RayWorkerBuilder, worker_aliases
from raycrew.worker_groups._start import Handle, Started, restart_workers, start_group
from raycrew.worker_groups._waiting import deadline_after, left
from raycrew.worker_groups.balancing import LoadBalancer, ProcessUsage, WorkerLoad
from raycrew.worker_groups.errors import WorkerGroupClosedError, WorkerGroupError
from raycrew.worker_groups.protocols import ArgumentTransport, EnvironmentProvider
from raycrew.worker_groups.sharding import NamedSharding

_KILL_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class RayWorkerGroup(GroupCalls):
    """One actor per rank on the bundles of a cluster.

    When the constructor returns, `__init__` has returned on every rank. On any failure no actor is left and
    the bundles are free again.

    Args:
        cluster: Where to place workers; a `RayVirtualCluster`, say.
        worker: A class, a `@ray.remote` class, a fully qualified name, or a `RayWorkerBuilder`.
        workers_per_node: Workers on each node, or one number per node; None for one worker per bundle.
        name_prefix: Name of the group; by default the worker class's.
        bundle_indices_list: Tied groups in rank order: `(node, [indices on it])`, or `[indices]` of them all.
        sharding_annotations: Named axes over the ranks.
        env_vars: Variables set in each worker before its class is imported.
        secrets: Names of variables of this process that workers get too, and that show up nowhere.
        environments: Which Python workers run in: a provider, "auto" for installed ones, None for this.
        transport: What encodes arguments on their way: a transport, "auto" for an installed one.
        enable_gradient_compression: Passed to workers in `current_worker().communication`.
        async_communication: Passed to workers in `current_worker().communication`.
        enable_load_balancing: Whether there is a `balancer`, which gives each call or item to one worker.
        load_balancing_strategy: How it chooses: "round_robin", "least_outstanding", "least_loaded",
            "consistent_hash", or a function of the workers' loads and a key; see `LoadBalancer`.
        idempotent_methods: Methods that may run twice, should a worker be lost on the way.
        init_timeout_s: Deadline of the whole start-up.
        ports_per_worker: Ports that each worker leases for itself, besides the group's rendezvous port.
        port_range: First and last port to lease from.
        progress: Whether to draw a progress bar; by default on a terminal.
        **init_kwargs: Further keyword arguments of the worker's `__init__`.

    Raises:
        WorkerFailureError: A worker failed during start-up, or was late (`WorkerStartTimeoutError`).
        ValueError: The layout doesn't fit the cluster, or a resource can't be had.
        TypeError: Arguments don't fit `__init__`.
        BundlesOccupiedError: Another group holds the bundles.
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
        env_vars: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
        environments: EnvironmentProvider | Literal["auto"] | None = None,
        transport: ArgumentTransport | Literal["auto"] | None = None,
        enable_gradient_compression: bool = False,
        async_communication: bool = False,
        enable_load_balancing: bool = False,
        load_balancing_strategy: str | Callable[[Sequence[WorkerLoad], Any], int] = "round_robin",
        idempotent_methods: Sequence[str] = (),
        init_timeout_s: float = 1200.0,
        ports_per_worker: int = 2,
        port_range: tuple[int, int] | None = None,
        progress: bool | None = None,
        **init_kwargs: Any,
    ) -> None:
        builder = worker if isinstance(worker, RayWorkerBuilder) else RayWorkerBuilder(worker)
        plan = plan_seats(cluster.bundles, workers_per_node, bundle_indices_list)
        _check_sharding(sharding_annotations, len(plan.seats))
        balancer = LoadBalancer(
            self,
            load_balancing_strategy,
            idempotent_methods=idempotent_methods,
            usage=lambda: self._usage(),  # there once the workers are
        )
        self._balancer = balancer if enable_load_balancing else None
        spec = GroupSpec(
            name=name_prefix or builder.fqn.rpartition(".")[2],
            builder=builder,
            cluster=cluster,
            plan=plan,
            init_kwargs=init_kwargs,
            env_vars=_checked_env_vars(env_vars),
            secrets=pick_secrets(secrets, os.environ),
            environments=environments,
            transport=transport_of(transport),
            communication=CommunicationOptions(enable_gradient_compression, async_communication),
            ports_per_worker=ports_per_worker,
            port_range=port_range,
            init_timeout_s=init_timeout_s,
            progress=progress,
        )
        self._spec = spec
        self.cluster = cluster
        self.sharding_annotations = sharding_annotations
        self._closed = False
        self._connection = connection()
        self._claim = cluster.claim(plan.indices, spec.name)
        try:
            self._started: Started = start_group(spec, self._claim)
        except BaseException:
            self._claim.release()
            raise
        rank_of = {position: rank for rank, position in enumerate(self._started.order)}
        self._tied_groups = [[rank_of[p] for p in group] for group in plan.tied_groups]
        if not plan.ordered:
            self._tied_groups.sort()
        self._shape = GroupShape(self._started.info, len(plan.seats), self._tied_groups, sharding_annotations)
        self._in_order = runs_in_order(self._started.info.is_async, self._started.options[0].actor)
        self._note_places()

    def _note_places(self) -> None:
        places = list(zip(self._started.ranks, self._started.facts, strict=True))
        self._places = {info.rank: Whereabouts(self.name, info, facts) for info, facts in places}
        self._usage = ProcessUsage({info.rank: (facts.node_id, facts.pid) for info, facts in places})

    # What the group is.

    @property
    def name(self) -> str:
        """Name of the group."""
        return self._spec.name

    @property
    def workers(self) -> list[Handle]:
        """Ray handles in rank order; they have the worker's methods."""
        return list(self._started.handles)

    @property
    def ranks(self) -> list[RankInfo]:
        """Where each rank is."""
        return list(self._started.ranks)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._started.ranks)

    @property
    def startup(self) -> StartupReport:
        """How long the phases of the start-up took; `print_startup` shows it."""
        return self._started.report

    @property
    def master_address(self) -> str:
        """Address of rank 0's node."""
        return self._started.ranks[0].master_address

    @property
    def master_port(self) -> int:
        """Port that rank 0 has leased for the group's rendezvous."""
        return self._started.ranks[0].master_port

    @property
    def tied_workers_groups(self) -> list[list[int]]:
        """Ranks of each tied group, leader first; without tied groups each rank is one of its own."""
        return [list(group) for group in self._tied_groups]

    @property
    def group_count(self) -> int:
        """Number of tied groups."""
        return len(self._tied_groups)

    @property
    def worker_to_tied_group_index(self) -> dict[int, int]:
        """Tied group of each rank."""
        return {rank: i for i, group in enumerate(self._tied_groups) for rank in group}

    @property
    def balancer(self) -> LoadBalancer:
        """Spreads calls (`call`) and streams of items (`map`, `as_completed`) over the workers.

        Raises:
            ValueError: The group was made without `enable_load_balancing=True`.
        """
        if self._balancer is None:
            raise ValueError(f"worker group {self.name!r} was made without enable_load_balancing=True")
        return self._balancer

    @property
    def placements(self) -> list[Placement]:
        """Which bundle each rank occupies, and how much of it."""
        tied = self.worker_to_tied_group_index
        placements = []
        for info, position in zip(self._started.ranks, self._started.order, strict=True):
            share = _share(self._claim.bundles[position], self._claim.actor_options(position))
            group = tied[info.rank] if len(self._tied_groups[tied[info.rank]]) > 1 else None
            placements.append(Placement(info.rank, info.bundle_index, share, group))
        return placements

    @property
    def worker_metadata(self) -> list[dict[str, Any]]:
        """Where each rank is, under the names that are usual in this field."""
        tied = self.worker_to_tied_group_index
        aliases = worker_aliases(self.name, self._spec.plan)
        return [
            {
                "node_idx": self._spec.plan.seats[position].bundle.node_index,
                "local_rank": info.local_rank,
                "global_rank": info.rank,
                "name": aliases[position],
                "bundle_indices": self._spec.plan.seats[position].tied_bundles,
                "tied_group_idx": tied[info.rank],
            }
            for info, position in zip(self._started.ranks, self._started.order, strict=True)
        ]

    def __len__(self) -> int:
        return self.world_size

    def __repr__(self) -> str:
        state = "shut down" if self._closed else f"{self.world_size} workers"
        return f"RayWorkerGroup({self.name!r}, {self._started.info.name}, {state})"

    # Life and death of single workers.

    def get_worker_status(self, timeout: float = 1.0) -> dict[int, WorkerStatus]:
        """What each rank is up to: "ready", "busy" (it did not answer within `timeout` seconds) or "dead".

        A busy worker may be doing its work or be stuck; that its process is there is all that this tells.
        """
        self._open()
        return worker_status(self._started.handles, timeout)

    def restart_failed_workers(self) -> list[int]:
        """Replace dead workers: same rank, bundle and arguments, new process; returns their ranks.

        The group gets a new generation, and a new master port if rank 0 was replaced. Workers that live keep
        their state; they see the new generation in `current_worker()` once their running call is over.

        Raises:
            WorkerFailureError: A new worker failed or was late; this can be tried again.
        """
        dead = [rank for rank, status in self.get_worker_status().items() if status == "dead"]
        if dead:
            logger.warning("%s: restarting ranks %s", self.name, dead)
            self._started = restart_workers(self._spec, self._claim, self._started, dead)
            self._note_places()
        return dead

    @property
    def generation(self) -> int:
        """0 at first; grows with every restart."""
        return self._started.ranks[0].generation

    # What people look at.

    def print_worker_layout(self, console: Console | None = None) -> None:
        """Print where each rank is."""
        table = Table(title=repr(self))
        for column in ("rank", "tied group", "node", "address", "local rank", "bundle", "device", "pid"):
            table.add_column(column, justify="right")
        tied = self.worker_to_tied_group_index
        for info, facts in zip(self._started.ranks, self._started.facts, strict=True):
            device = "" if info.device_index is None else f"{facts.device_kind}:{info.device_index}"
            row = (info.rank, tied[info.rank], info.node_rank, info.node_address, info.local_rank)
            table.add_row(*map(str, (*row, info.bundle_index, device, facts.pid)))
        (console or Console()).print(table)

    def print_startup(self, console: Console | None = None) -> None:
        """Print how long each phase of the start-up took."""
        (console or Console()).print(self.startup.table())

    # The end.

    def shutdown(self, cleanup_method: str | None = None, timeout: float = 30.0, force: bool = False) -> bool:
        """End all workers and give their bundles back; idempotent.

        Args:
            cleanup_method: Method to call on each worker first.
            timeout: Seconds for it, and for the workers to end by themselves; then they are killed.
            force: Kill them at once.

        Returns:
            Whether clean-up succeeded and every worker ended by itself (or was to be killed, with `force`).
        """
        if self._closed:
            return True
        deadline = deadline_after(timeout)
        clean = True
        if cleanup_method is not None:
            self._shape.method(cleanup_method)
            clean = force or self._clean_up(cleanup_method, left(deadline))
        self._closed = True
        try:
            return self._end(left(deadline) or 0.0, force) and clean
        finally:
            self._claim.release()

    def _clean_up(self, method: str, timeout: float | None) -> bool:
        try:
            self.on(timeout=timeout).call(method).get_results()
        except (WorkerGroupError, RayError) as error:
            logger.warning("%s: %s before the shutdown: %s", self.name, method, error)
            return False
        return True

    def _end(self, timeout_s: float, force: bool) -> bool:
        handles = self._started.handles
        if connection() != self._connection:
            logger.warning("%s: Ray is down already, so its workers are gone", self.name)
            return False
        living = list(range(len(handles)))
        try:
            if not force:
                request_exit(handles)
                living = await_end(handles, timeout_s)
        finally:
            end_actors([handles[i] for i in living])
        stubborn = await_end([handles[i] for i in living], _KILL_TIMEOUT_S)
        if stubborn:
            logger.warning("%s: %d killed workers are still there", self.name, len(stubborn))
        return force or not living

    # How calls are sent.

    def _open(self) -> GroupShape:
        if self._closed:
            raise WorkerGroupClosedError(f"worker group {self.name!r} was shut down")
        if connection() != self._connection:  # a call would join whatever Ray it finds
            raise WorkerGroupClosedError(
                f"the connection to Ray that worker group {self.name!r} was made with is closed"
            )
        return self._shape

    def _send(self, dispatch: Dispatch, timeout: float | None) -> MultiWorkerFuture[Any]:
        return send_to_actors(
            dispatch,
            self._started.handles,
            self._places,
            group_name=self.name,
            transport=self._spec.transport,
            timeout=timeout,
            in_order=self._in_order,
        )


def _check_sharding(sharding: NamedSharding | None, n_workers: int) -> None:
    if sharding is not None and set(sharding) != set(range(n_workers)):
        raise ValueError(
            f"sharding_annotations has {sharding.size} ranks, the group {n_workers}: 0 to {n_workers - 1}"
        )


def _checked_env_vars(env_vars: Mapping[str, str] | None) -> dict[str, str]:
    for name, value in (env_vars or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env_vars are strings, not {name!r}: {value!r}")
    return dict(env_vars or {})


def _share(bundle: Bundle, options: Mapping[str, Any]) -> float:
    for resource, option in (("GPU", "num_gpus"), ("CPU", "num_cpus")):
        if bundle.resources.get(resource):
            return float(options.get(option, 0) / bundle.resources[resource])
    return 1.0
