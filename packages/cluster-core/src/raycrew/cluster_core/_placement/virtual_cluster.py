"""`RayVirtualCluster`: bundles on a Ray cluster, allocated, known and released as one."""

import html
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from ray.util.placement_group import PlacementGroup

from raycrew.cluster_core import _ray, layout
from raycrew.cluster_core._placement.allocation import Allocation, Allocator
from raycrew.cluster_core._placement.claims import Claims
from raycrew.cluster_core._placement.forgetting import give_back_when_forgotten
from raycrew.cluster_core._placement.holding import Holding
from raycrew.cluster_core._placement.indices import at
from raycrew.cluster_core._placement.ledger import LedgerClaim
from raycrew.cluster_core._placement.options import BundleSpecs, ClusterOptions, GpuIds, LabelSelector
from raycrew.cluster_core._placement.signatures import with_arguments_of
from raycrew.cluster_core._planning import Bundle, NodeOrder, PlacementPlan, Rendezvous, plan_cluster
from raycrew.cluster_core._ports import PortKeepers
from raycrew.cluster_core._ray import node_states, run_on_nodes
from raycrew.cluster_core.errors import ClusterClosedError
from raycrew.cluster_core.memory import BundleMemory, MemoryMonitor, memory_usage
from raycrew.cluster_core.protocols import Occupant

T = TypeVar("T")


class RayVirtualCluster:
    """Bundles on a Ray cluster for worker groups to sit on.

    Everything is allocated when the constructor returns. Leaving the `with` block or `shutdown()` releases
    it; so does the end of the driver, however it ends, or of the connection to Ray. A cluster that is merely
    forgotten, together with the claims on it, is released with a `ResourceWarning`.

    Args:
        bundle_ct_per_node_list: Bundles per logical node, such as `[4, 8, 2]`; a zero leaves a hole.
        use_gpus: Whether each bundle holds one accelerator.
        max_colocated_worker_groups: Worker groups that can share each bundle.
        num_gpus_per_node: Devices of a physical node: a bundle with more, or more together of a logical node
            with STRICT_PACK, is refused before Ray is asked. By default what the nodes have.
        name: Readable start of the names of the placement groups.
        placement_group_strategy: How the bundles of one logical node lie: STRICT_PACK on one physical node,
            PACK on few, SPREAD on many, STRICT_SPREAD each on another.
        accelerator: Ray's name of the resource that a bundle holds one of, such as "GPU", "NPU" or "TPU".
        gpu_ids: Physical devices: one list for every node, a list per node, or "auto" to learn at once which
            devices were granted.
        enable_colocation: Two slots per bundle, unless `max_colocated_worker_groups` says more.
        monitor_memory: Watch the memory of the bundles from the start.
        communication_backend: What worker groups on this cluster tell their workers to communicate with.
        cpus_per_bundle: CPUs of each bundle; one per slot by default.
        unified: One placement group for all nodes, for workers that span nodes.
        segment_size: Runs of this many consecutive nodes lie in one NVLink domain each.
        label_selector: Labels that each node must have, in Ray's notation; or a list, one for each logical
            node.
        topology_strategy: In Ray's notation: `{label: "STRICT_PACK"}` keeps all nodes within one value of it.
            What it says of "ray.io/node-id" counts in place of `placement_group_strategy`.
        timeout_s: Deadline of the allocation, all retries included.
        max_retries: How often placement groups are created anew after Ray failed to grant them; by default
            what NRL_VIRTUAL_CLUSTER_MAX_RETRIES says, else 6.
        port_range: First and last port that are leased; by default below the ephemeral ports.
        bundle_specs: What the bundles hold, where they are not alike: a `BundleSpec` for all, or a list with
            one for each logical node, or with a list of one for each of its bundles.
        node_order: In which order physical nodes are taken: a rank for each, by node id, or a function of a
            `NodeState` that gives one. The lowest comes first; nodes without a rank, or with None, come last.

    Raises:
        TypeError: An argument is of a wrong type; Ray was not touched.
        ValueError: An argument is out of bounds or contradicts another one; Ray was not touched.
        InfeasibleRequestError: The nodes are too few or too small, and no autoscaler is running.
        ResourceInsufficientError: It was not granted; says per node what is free and who holds the rest.

    Examples:
        >>> with RayVirtualCluster([2], use_gpus=False) as cluster:
        ...     print(cluster.world_size(), [bundle.resources for bundle in cluster.bundles])
        2 [{'CPU': 1.0}, {'CPU': 1.0}]
    """

    def __init__(
        self,
        bundle_ct_per_node_list: Sequence[int],
        use_gpus: bool = True,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int | None = None,
        name: str = "",
        placement_group_strategy: str = "STRICT_PACK",
        *,
        accelerator: str = "GPU",
        gpu_ids: GpuIds = None,
        enable_colocation: bool = False,
        monitor_memory: bool = False,
        communication_backend: str = "auto",
        cpus_per_bundle: float | None = None,
        unified: bool = False,
        segment_size: int | None = None,
        label_selector: LabelSelector = None,
        topology_strategy: Mapping[str, str] | None = None,
        timeout_s: float = 180.0,
        max_retries: int | None = None,
        port_range: tuple[int, int] | None = None,
        bundle_specs: BundleSpecs = None,
        node_order: NodeOrder = None,
    ) -> None:
        self._options = options = ClusterOptions.among(locals())
        session = _ray.check_connected()
        allocation = self._allocate()
        try:
            claims = Claims(allocation, options.slots, options.bundle_accelerator)
            keepers = PortKeepers(options.port_range)
            self._held = Holding(self.name, session, allocation, claims, keepers, owner=True)
            if options.monitor_memory:
                self._held.monitor = MemoryMonitor(weakref.proxy(self)).start()
            self._give_back_when_forgotten()
        except BaseException:
            allocation.remove()
            raise

    def _give_back_when_forgotten(self) -> None:
        held = self._held
        what = f"virtual cluster {held.name!r} was forgotten without shutdown(); its bundles are given back"
        give_back_when_forgotten(self, what, held.give_back, lambda: held.is_held)

    def _allocate(self) -> Allocation:
        options = self._options
        allocator = Allocator(
            options.request,
            alias=options.alias,
            unified=options.unified,
            gpu_ids=options.devices,
            accelerator=options.accelerator,
            timeout_s=options.timeout_s,
            max_retries=options.retries,
        )
        return allocator.allocate()

    @classmethod
    @with_arguments_of(__init__)
    def plan(cls, **arguments: Any) -> PlacementPlan:
        """Say where the running cluster would put such a virtual cluster now, without allocating anything.

        Args:
            **arguments: Those of the constructor, by position or name as there.
        """
        options = ClusterOptions.among(arguments)
        return plan_cluster(node_states(options.request.domain_label), options.request)

    @property
    def name(self) -> str:
        """Readable name."""
        return self._options.alias

    @property
    def session(self) -> _ray.Session:
        """The connection to Ray that this cluster belongs to."""
        return self._held.session

    @property
    def communication_backend(self) -> str:
        """What worker groups tell their workers to communicate with."""
        return self._options.communication_backend

    @property
    def max_colocated_worker_groups(self) -> int:
        """Worker groups that can share each bundle."""
        return self._options.slots

    @property
    def bundles(self) -> Sequence[Bundle]:
        """All bundles, ordered by (node, device index).

        Devices are known only inside a bundle's own processes: within a node the order is final once a worker
        group, or a claim on some of its bundles, learnt them.
        """
        self._held.check()
        return self._held.claims.bundles

    def world_size(self) -> int:
        """How many bundles there are."""
        return sum(self._options.request.bundle_counts)

    def node_count(self) -> int:
        """How many logical nodes there are, those without bundles included."""
        return len(self._options.request.bundle_counts)

    def get_placement_groups(self) -> list[PlacementGroup]:
        """The placement groups, one per logical node that has bundles, or a single unified one.

        Bundles in a group, and those with parts of devices above all, stand in the order in which Ray grants
        them: where one of `bundles` is, `claim(...).actor_options(i)` tells.
        """
        self._held.check()
        return list(self._held.allocation.groups)

    def claim(self, indices: Sequence[int] | None, holder: str) -> LedgerClaim:
        """Take one slot on each named bundle (all of them for None) for `holder`.

        What is not released ends with the process that claimed it: an actor, a driver, or the worker in which
        a task ran. Behind a `ray://` proxy it ends with the job; `release_holder` gives it back before.

        Raises:
            ValueError: An index is out of range or repeated.
            BundlesOccupiedError: A bundle has no free slot; says who holds them.
            NodeLostError: A node with one of them is gone.
            BundlesLostError: Somebody else removed a placement group that one of them was in.
            ClusterError: Some bundles of a node were named, and its bundles did not tell their devices.
        """
        self._held.check()
        self._check_seats(self._held.claims.seats(indices))
        return self._held.claims.claim(indices, holder, self._check_seats)

    def release_holder(self, holder: str) -> int:
        """Give back all slots of a holder that died without doing so; return how many claims that were."""
        self._held.check()
        return self._held.claims.release_holder(holder)

    def holders(self) -> dict[int, tuple[str, ...]]:
        """Who holds slots, by bundle index; bundles that nobody holds are left out."""
        self._held.check()
        return self._held.claims.holders()

    def check_nodes(self) -> None:
        """Make sure that every node of this cluster is alive, and every placement group there.

        Raises:
            ClusterClosedError: The cluster was shut down, or the connection to Ray that it belongs to ended.
            BundlesLostError: Somebody else removed a placement group; says which bundles were on it.
            NodeLostError: A node is gone; says which, and which bundles were on it.
        """
        self._check_seats(None)

    def _check_seats(self, seats: Collection[int] | None) -> None:
        """The same for the nodes and placement groups of some seats alone."""
        self._held.check()
        self._held.claims.check_nodes(self.name, seats)
        self._held.claims.check_groups(seats)

    def rendezvous(self, bundle_index: int = 0, n_ports: int = 1, *, consecutive: bool = False) -> Rendezvous:
        """Lease `n_ports` ports on the node of a bundle until the cluster is shut down.

        Raises:
            IndexError: There is no such bundle.
            PortsExhaustedError: Too few ports of the range are free on the node.
            NodeLostError: The node is gone.
        """
        node_id = at(self.bundles, bundle_index, "bundle index").node_id
        return self._held.keepers.lease(node_id, n_ports, consecutive=consecutive)

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Address of the first bundle's node and a port there that nobody else gets, a new one each time."""
        meeting = self.rendezvous()
        return meeting.address, meeting.port

    def get_available_address_and_port(self, pg_idx: int, bundle_idx: int) -> tuple[str, int]:
        """Address of a bundle's node and a port there that nobody else gets.

        Args:
            pg_idx: Position in `get_placement_groups()`.
            bundle_idx: Bundle index within that placement group, as Ray counts: see `get_placement_groups`.
        """
        return self.get_available_addresses_and_ports([(pg_idx, bundle_idx)])[0]

    def get_available_addresses_and_ports(self, where: Sequence[tuple[int, int]]) -> list[tuple[str, int]]:
        """The batch form of `get_available_address_and_port`: all nodes are asked at the same time.

        Args:
            where: Pairs of placement group position and bundle index.
        """
        self._held.check()
        bundles = [self._held.claims.bundle_at(*place) for place in where]
        waits = [self._held.keepers.start(bundle.node_id) for bundle in bundles]
        return [(meeting.address, meeting.port) for meeting in (wait() for wait in waits)]

    def run_on_each_node(self, fn: Callable[[], T], *, timeout_s: float = 300.0) -> Iterator[tuple[str, T]]:
        """Run `fn` once on each physical node, at no resources; yield (node id, result) as nodes finish.

        Args:
            fn: Called without arguments.
            timeout_s: Deadline for all nodes together.

        Raises:
            NodeCallError: `fn` raised on a node; raised after the other nodes' results.
            NodeCallTimeoutError: A node did not answer in time.
            ExceptionGroup: Of such errors, when there are several.
        """
        return run_on_nodes(list(dict.fromkeys(b.node_id for b in self.bundles)), fn, timeout_s)

    def print_cluster_grid(self, worker_group: Occupant | None = None) -> None:
        """Print the nodes, their bundles, and where the workers of a group sit."""
        self.print_all_worker_groups([] if worker_group is None else [worker_group])

    def print_all_worker_groups(self, groups: Sequence[Occupant]) -> None:
        """Print the nodes, their bundles, and where the workers of some groups sit."""
        layout.print_grid(self.bundles, groups, title=self.name)

    def layout_svg(self, groups: Sequence[Occupant] = ()) -> str:
        """Draw the nodes, their bundles, and where the workers of some groups sit."""
        return layout.svg(self.bundles, groups, title=self.name)

    def _repr_html_(self) -> str:
        try:
            return self.layout_svg()
        except ClusterClosedError as error:
            return f"<p>{html.escape(f'{self!r}: {error}')}</p>"

    def memory_usage(self) -> list[BundleMemory]:
        """Read the host and device memory of every bundle, in bundle order."""
        return memory_usage(self)

    @property
    def memory_monitor(self) -> MemoryMonitor | None:
        """What watches the memory, with its high-water marks; None without `monitor_memory=True`."""
        return self._held.monitor

    def shutdown(self) -> None:
        """Release everything; idempotent, and what runs on the bundles ends.

        Returns when it is done, from whichever thread it was called first. Where the connection to Ray ended,
        nothing is left to release. Where Ray's control service does not answer, it goes on in the background.
        One that is interrupted can be repeated.

        On a copy that travelled to another process it only ends the copy: the bundles stay with their owner.
        """
        self._held.give_back()

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process of the same Ray cluster, which then shares the slots with this one."""
        self._held.check()
        return _copy, (self._options.of_a_copy(), self._held.allocation, self._held.claims)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        counts = list(self._options.request.bundle_counts)
        return f"RayVirtualCluster({counts}, name={self.name!r}{'' if self._held.is_open else ', shut down'})"


def _copy(options: ClusterOptions, allocation: Allocation, claims: Claims) -> RayVirtualCluster:
    cluster = RayVirtualCluster.__new__(RayVirtualCluster)
    keepers = PortKeepers(options.port_range)
    held = Holding(options.alias, _ray.check_connected(), allocation, claims, keepers, owner=False)
    vars(cluster).update(_options=options, _held=held)
    return cluster
