"""A group of workers on Ray, one actor per rank, called as a unit."""

import logging
from collections.abc import Mapping
from typing import Any

from raycrew.worker_groups._base import WorkerGroup
from raycrew.worker_groups._calls import Dispatch, GroupShape, MultiWorkerFuture, send_to_actors
from raycrew.worker_groups._ray_compat import (
    WorkerStatus,
    await_end,
    connection,
    end_actors,
    request_exit,
    runs_in_order,
    worker_status,
)
from raycrew.worker_groups._start import Started, restart_workers, start_group
from raycrew.worker_groups.balancing import ProcessUsage
from raycrew.worker_groups.errors import WorkerGroupClosedError

_KILL_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class RayWorkerGroup(WorkerGroup):
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

    def _start(self) -> Started:
        self._connection = connection()
        started = start_group(self._spec, self._claim)
        self._in_order = runs_in_order(started.info.is_async, started.options[0].actor)
        return started

    def _note_places(self) -> None:
        super()._note_places()
        places = zip(self._started.ranks, self._started.facts, strict=True)
        self._usage = ProcessUsage({info.rank: (facts.node_id, facts.pid) for info, facts in places})

    def _resource_use(self) -> Mapping[int, float]:
        return self._usage()

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

    def _open(self) -> GroupShape:
        shape = super()._open()
        if connection() != self._connection:  # a call would join whatever Ray it finds
            raise WorkerGroupClosedError(
                f"the connection to Ray that worker group {self.name!r} was made with is closed"
            )
        return shape

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
