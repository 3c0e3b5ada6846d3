"""Where the groups of roles sit: on clusters of their own, parts of a given one, or beside other workers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

from raycrew.cluster_core import Cluster, RayVirtualCluster, Session, accelerators_of, node_states
from raycrew.worker_groups._group import Beside
from raycrew.worker_groups._ray import check_session, current_session
from raycrew.worker_groups.scheduling._plan import GroupPlan, choose_bundles, the_one_accelerator

#: Bundles of a group's workers, in their order.
Seating = Sequence[Sequence[int]] | None


@dataclass(frozen=True, slots=True)
class Site:
    """Where one group sits.

    Attributes:
        cluster: The bundles.
        seating: Which of them each worker has; None for one each, in the cluster's own order.
        release: Gives back what is held for it, once the group has ended.
    """

    cluster: Cluster
    seating: Seating = None
    release: Callable[[], object] = field(default=tuple)


class Sites(Protocol):
    """Finds places for groups."""

    def take(self, plan: GroupPlan, timeout_s: float) -> Site:
        """A site for a group, which nobody else has."""
        ...


class OwnSites:
    """A virtual cluster for each group, allocated when the group is created.

    Args:
        session: The connection to Ray; None for that which this process has when it is first needed.
        accelerator: Ray's name of what workers are given as accelerators; None to find it.
        port_range: First and last port that is leased.
    """

    def __init__(
        self, session: Session | None, accelerator: str | None, port_range: tuple[int, int] | None
    ) -> None:
        self._session, self._accelerator, self._port_range = session, accelerator, port_range

    def take(self, plan: GroupPlan, timeout_s: float) -> Site:
        """Allocate a virtual cluster.

        Raises:
            ClusterError: It was not granted within the time.
            WorkerConfigurationError: There are several kinds of accelerators.
            WorkerGroupClosedError: The connection to Ray has ended.
        """
        self._session = self._session or current_session()
        check_session(self._session, "a scheduler")
        uses_devices = any(bundle.gpus for bundle in plan.bundles)
        cluster = RayVirtualCluster(
            [len(plan.bundles)],
            use_gpus=uses_devices,
            accelerator=self._found() if uses_devices else "GPU",
            name=plan.name.replace("/", "-"),
            placement_group_strategy="PACK",
            bundle_specs=[plan.bundles],
            port_range=self._port_range,
            timeout_s=timeout_s,
        )
        with ExitStack() as undo:
            undo.callback(cluster.shutdown)
            site = self._site(cluster, plan)
            undo.pop_all()
        return site

    def _found(self) -> str:
        if self._accelerator is None:
            self._accelerator = the_one_accelerator(
                name for node in node_states() for name in accelerators_of(node.total)
            )
        return self._accelerator

    def _site(self, cluster: RayVirtualCluster, plan: GroupPlan) -> Site:
        if plan.is_deferred:
            return deferred_site(cluster, None, plan.name, cluster.shutdown)
        if len(set(map(str, plan.bundles))) == 1:
            return Site(cluster, None, cluster.shutdown)
        accelerator = self._accelerator or "GPU"
        chosen = choose_bundles(cluster.bundles, (), plan.bundles, accelerator=accelerator)
        return Site(cluster, [[index] for index in chosen], cluster.shutdown)


class GivenSites:
    """The free bundles of a cluster that somebody else has made and keeps.

    Args:
        cluster: The cluster.
        accelerator: Ray's name of what workers are given as accelerators; None to find it.
    """

    def __init__(self, cluster: Cluster, accelerator: str | None) -> None:
        self._cluster, self._accelerator = cluster, accelerator
        self._taken: set[int] = set()
        self._lock = Lock()

    def take(self, plan: GroupPlan, timeout_s: float) -> Site:  # noqa: ARG002 - there is nothing to wait for
        """Take free bundles that are large enough.

        Raises:
            WorkerCreationError: There are none.
            WorkerConfigurationError: The bundles hold several kinds of accelerators.
        """
        bundles = self._cluster.bundles
        accelerator = self._found() if any(bundle.gpus for bundle in plan.bundles) else "GPU"
        with self._lock:
            holders: Callable[[], Mapping[int, Any]] = getattr(self._cluster, "holders", dict)
            chosen = choose_bundles(
                bundles,
                {*self._taken, *holders()},
                plan.bundles,
                accelerator=accelerator,
                slots=getattr(self._cluster, "max_colocated_worker_groups", 1),
            )
            self._taken.update(chosen)
        if plan.is_deferred:
            return self._deferred(chosen, plan.name)
        return Site(self._cluster, [[index] for index in chosen], lambda: self._release(chosen))

    def _found(self) -> str:
        if self._accelerator is None:
            self._accelerator = the_one_accelerator(
                name for bundle in self._cluster.bundles for name in accelerators_of(bundle.resources)
            )
        return self._accelerator

    def _deferred(self, chosen: Sequence[int], name: str) -> Site:
        with ExitStack() as undo:
            undo.callback(self._release, chosen)
            site = deferred_site(self._cluster, chosen, name, lambda: self._release(chosen))
            undo.pop_all()
        return site

    def _release(self, indices: Sequence[int]) -> None:
        with self._lock:
            self._taken.difference_update(indices)


def deferred_site(
    cluster: Cluster, indices: Sequence[int] | None, holder: str, release: Callable[[], object]
) -> Site:
    """A place for one worker on the first of some bundles, which are held for what it starts.

    Raises:
        ClusterError: A bundle has no free slot.
    """
    claim = cluster.claim(indices, holder)

    def give_back() -> None:
        claim.release()
        release()

    return Site(Beside(cluster, claim, [0]), [[0]], give_back)
