"""A group as those see it who call it and do not own it."""

from typing import TYPE_CHECKING, Any

from raycrew.worker_groups._calls import (
    Dispatch,
    GroupCalls,
    GroupShape,
    MultiWorkerFuture,
    deadline_after,
    unknown_attribute,
)
from raycrew.worker_groups._group.handles.routes import Route
from raycrew.worker_groups.balancing import Balanced, LoadBalancer
from raycrew.worker_groups.sharding import NamedSharding, RankInfo


class GroupHandle(GroupCalls, Balanced):
    """Calls the workers of a group from any task or actor of the cluster; `group.handle()` makes it.

    It can be pickled where the group's transport and a balancing strategy of one's own can, carries no
    secrets and none of the workers' variables and arguments, and offers nothing that ends, restarts or
    changes the group. That is a matter of order and no boundary of security: whoever is connected to the same
    Ray can end its actors.

    Calls, declared calls, streams, the balancer, futures and errors are those of the group. Once a call fails
    because a worker died, the handle asks an actor of the group's who its members are now, and goes on with
    those: its owner may have restarted some. The call that failed raises all the same, as it may have run;
    only items of a balancer go again, if their method is among the group's `idempotent_methods`. Where the
    dead have not been replaced yet, it asks again before each call. It neither restarts a group nor keeps it
    alive. While the group gets a new generation, a call on a survivor runs in the old one, or after its
    `on_generation`. In another process than the group's, a worker that was ended for its `memory_limit` is
    told by a plain `WorkerFailureError`.

    Examples:
        >>> class Namer:
        ...     def name(self) -> str:
        ...         return f"rank {current_worker().rank}"
        >>> with RayWorkerGroup(cluster, Namer) as group:
        ...     handle = group.handle()  # to be passed to any task or actor
        ...     print(handle.world_size, handle.call(Namer.name).get_results())
        2 ['rank 0', 'rank 1']
    """

    def __init__(self, route: Route) -> None:
        self._route = route
        self._balancer: LoadBalancer | None = None
        if route.strategy is not None:
            again, use = route.idempotent_methods, route.usage
            self._balancer = LoadBalancer(self, route.strategy, idempotent_methods=again, usage=use)

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupHandle, (self._route,)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Point at the way to call a method of the workers."""
            route = vars(self).get("_route")
            raise unknown_attribute(self, name, () if route is None else route.info.methods)

    @property
    def name(self) -> str:
        """Name of the group."""
        return self._route.name

    @property
    def ranks(self) -> list[RankInfo]:
        """Where each rank is, as far as this handle knows."""
        return list(self._route.members().ranks)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._route.known().ranks)

    def __len__(self) -> int:
        return self.world_size

    @property
    def generation(self) -> int:
        """The group's generation, as far as this handle knows; `refresh` asks for it."""
        return self._route.members().generation

    @property
    def tied_workers_groups(self) -> list[list[int]]:
        """Ranks of each tied group, leader first; without tied groups each rank is one of its own."""
        return [list(group) for group in self._route.known().tied_groups]

    @property
    def sharding_annotations(self) -> NamedSharding | None:
        """Named axes over the ranks."""
        return self._route.known().sharding

    def __repr__(self) -> str:
        members = self._route.known()
        workers = "1 worker" if len(members.ranks) == 1 else f"{len(members.ranks)} workers"
        return f"GroupHandle({self.name!r}, {workers}, generation {members.generation})"

    def refresh(self) -> int:
        """Ask who the members of the group are now, without waiting for a call to fail; gives its generation.

        Raises:
            WorkerGroupClosedError: The group was shut down, or the connection to Ray has ended.
            WorkerGroupError: The actor that knows is gone while members live (a restart makes it anew), or
                does not answer.
            RayError: Ray failed otherwise.
        """
        self._route.refresh()
        return self.generation

    def _open(self) -> GroupShape:
        return self._route.shape()

    def _send(self, dispatch: Dispatch, timeout: float | None) -> MultiWorkerFuture[Any, Any]:
        deadline_after(timeout)  # what is no time is refused before anything is sent
        return self._route.send(dispatch, timeout)
