"""Who sits where before start-up, and which rank each worker gets from where it really is; pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, cast

from raycrew.cluster_core import Bundle, Claim

#: One tied group: its logical node and bundle indices on it, or bundle indices of the whole cluster.
TiedBundles = tuple[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One worker's place in its group.

    Attributes:
        rank: 0 to world_size - 1.
        world_size: Number of workers in the group.
        local_rank: Dense rank among the group's workers on the same physical node.
        local_world_size: Number of the group's workers on that node.
        node_rank: Dense number of that node in the group, by first rank.
        node_id: Ray node id.
        node_address: IP address of the node.
        bundle_index: The cluster's bundle that the worker occupies.
        device_index: Physical device on the node, or None.
        master_address: Address of rank 0's node.
        master_port: Port that rank 0's process has leased for the group's rendezvous.
        ports: Further ports that this worker's process has leased.
        group_name: Name of the group.
        generation: 0 at first; grows whenever workers of the group are replaced or its rendezvous is renewed.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_id: str
    node_address: str
    bundle_index: int
    device_index: int | None
    master_address: str
    master_port: int
    ports: tuple[int, ...]
    group_name: str
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker before it is started.

    Attributes:
        position: Position in the group's claim, and place in the order that was asked for.
        bundle: Bundle that it will occupy.
        tied_group: Tied group that it belongs to.
        place_in_group: Place in its tied group; 0 is the leader.
        tied_bundles: What `configure_worker` is told: for the leader of a tied group, the node and the
            bundles of the group, else those of the worker; None for the others of a tied group.
        number_on_node: Its number among the group's seats on the logical node that its name tells.
        named_node: That node, where the worker has moved to another one; else it is its bundle's.
    """

    position: int
    bundle: Bundle
    tied_group: int
    place_in_group: int = 0
    tied_bundles: tuple[int, list[int]] | None = None
    number_on_node: int = 0
    named_node: int | None = None

    @property
    def home(self) -> int:
        """The logical node that its worker's name tells."""
        return self.bundle.node_index if self.named_node is None else self.named_node


@dataclass(frozen=True, slots=True)
class SeatPlan:
    """All workers of a group before start-up.

    Attributes:
        seats: One per worker, in the order that was asked for.
        indices: Bundles to claim, or None for all of them in whatever order they turn out to be.
        ordered: Whether ranks follow the order of `seats` rather than the cluster's order of their bundles.
    """

    seats: tuple[Seat, ...]
    indices: tuple[int, ...] | None
    ordered: bool

    @property
    def tied_groups(self) -> list[list[int]]:
        """Positions of each tied group's workers, leader first."""
        groups: dict[int, list[int]] = {}
        for seat in self.seats:
            groups.setdefault(seat.tied_group, []).append(seat.position)
        return list(groups.values())


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker's process says about itself before it gets a rank.

    `pid` in `pid_namespace` with its start (`started`, in clock ticks since the node's boot) is this process
    and no later one; `mark` is carried by all that it starts. Should it be rank 0, the group meets at
    `master_port`, and in its next generation at `spare_port`. `memory_limit_bytes` is its group's word; 0 is
    no limit.
    """

    node_id: str
    node_address: str
    pid: int
    device_kind: str = "cpu"
    device_index: int | None = None
    local_device_index: int | None = None
    master_port: int = 0
    spare_port: int = 0
    ports: tuple[int, ...] = ()
    log_paths: tuple[str, ...] = ()
    process_age_s: float = 0.0
    inbox: str = ""
    started: int = 0
    pid_namespace: str = ""
    mark: str = field(default="", repr=False)
    memory_limit_bytes: int = 0


def plan_seats(
    bundles: Sequence[Bundle],
    workers_per_node: int | Sequence[int] | None = None,
    bundle_indices_list: Sequence[TiedBundles | Sequence[int]] | None = None,
    n_spare: int = 0,
) -> SeatPlan:
    """Decide which bundles a group occupies.

    Args:
        bundles: All bundles of the cluster, in its order.
        workers_per_node: Workers on each node, or one number per node that has bundles; None for one worker
            per bundle.
        bundle_indices_list: Tied groups in rank order: `(node, [indices on it])`, nodes being those that
            have bundles, or `[indices]` of the whole cluster for groups that span nodes.
        n_spare: How many bundles are to be left besides, which are the last ones where nothing says who is
            where; ranks that may move to one of those can't be tied.

    Raises:
        ValueError: Both arguments are given, counts or indices are out of range, a bundle is named twice, or
            there are spare bundles and tied ranks, or nothing but those.
        TypeError: A number, an index or a node is no whole number.
    """
    if workers_per_node is not None and bundle_indices_list is not None:
        raise ValueError("give workers_per_node or bundle_indices_list, not both")
    if not bundles:
        raise ValueError("the cluster has no bundles to place workers on")
    by_node = _by_node(bundles)
    if bundle_indices_list is not None:
        return _movable(_tied_plan(bundles, by_node, bundle_indices_list), n_spare)
    if workers_per_node is None and len(bundles) <= n_spare:
        raise ValueError(f"all {len(bundles)} bundle(s) of the cluster are to be spare, and none for workers")
    if workers_per_node is None:
        chosen = list(bundles[: len(bundles) - n_spare])
    else:
        counts = _counts(by_node, workers_per_node)
        chosen = [b for node, n in zip(by_node, counts, strict=True) for b in node[:n]]
    if not chosen:
        raise ValueError(f"workers_per_node={workers_per_node!r} asks for no worker at all")
    indices = None if len(chosen) == len(bundles) else tuple(b.index for b in chosen)
    return SeatPlan(_seats(chosen, by_node), indices, ordered=False)


def _movable(plan: SeatPlan, n_spare: int) -> SeatPlan:
    tied = [group for group in plan.tied_groups if len(group) > 1]
    if n_spare and tied:
        raise ValueError(f"spare bundles and standby= are for ranks that are not tied; {tied[0]} are")
    return plan


def _seats(chosen: Sequence[Bundle], by_node: Sequence[Sequence[Bundle]]) -> tuple[Seat, ...]:
    places = {bundle.index: (n, [i]) for n, node in enumerate(by_node) for i, bundle in enumerate(node)}
    seats = (Seat(i, bundle, i, 0, places[bundle.index]) for i, bundle in enumerate(chosen))
    return _numbered(seats)


def _numbered(seats: Iterable[Seat]) -> tuple[Seat, ...]:
    seen: Counter[int] = Counter()
    numbered = []
    for seat in seats:
        numbered.append(replace(seat, number_on_node=seen[seat.bundle.node_index]))
        seen[seat.bundle.node_index] += 1
    return tuple(numbered)


def _by_node(bundles: Sequence[Bundle]) -> list[list[Bundle]]:
    nodes: dict[int, list[Bundle]] = {}
    for bundle in bundles:
        nodes.setdefault(bundle.node_index, []).append(bundle)
    return list(nodes.values())


def _counts(by_node: Sequence[Sequence[Bundle]], workers_per_node: int | Sequence[int]) -> list[int]:
    if not isinstance(workers_per_node, int | Integral | Iterable):
        raise TypeError(
            f"workers_per_node is a number, or one for each node, and no {type(workers_per_node).__name__}; "
            "what a worker's __init__ takes is given by name"
        )
    n = len(by_node)
    given = workers_per_node if isinstance(workers_per_node, Iterable) else [workers_per_node] * n
    counts = [_whole("workers_per_node", count) for count in given]
    if len(counts) != n:
        raise ValueError(f"workers_per_node has {len(counts)} entries for {n} node(s) with bundles")
    for node, (count, held) in enumerate(zip(counts, by_node, strict=True)):
        if not 0 <= count <= len(held):
            raise ValueError(f"node {node} has {len(held)} bundle(s), which is no room for {count} worker(s)")
    return counts


def _tied_plan(
    bundles: Sequence[Bundle],
    by_node: Sequence[Sequence[Bundle]],
    groups: Sequence[TiedBundles | Sequence[int]],
) -> SeatPlan:
    seats: list[Seat] = []
    for number, entry in enumerate(groups):
        node, local = _node_and_indices(entry)
        pool = bundles if node is None else _node(by_node, node, number)
        if not local:
            raise ValueError(f"tied group {number} names no bundle")
        for place, index in enumerate(local):
            if not 0 <= index < len(pool):
                where = "the cluster" if node is None else f"node {node}"
                raise ValueError(f"tied group {number}: {where} has no bundle {index} (it has {len(pool)})")
            told = (node or 0, list(local)) if place == 0 else None
            seats.append(Seat(len(seats), pool[index], number, place, told))
    if not seats:
        raise ValueError("bundle_indices_list is empty")
    indices = tuple(seat.bundle.index for seat in seats)
    if twice := [index for index, n in Counter(indices).items() if n > 1]:
        raise ValueError(f"bundle_indices_list names bundle(s) {twice} more than once")
    return SeatPlan(_numbered(seats), indices, ordered=True)


def _node_and_indices(entry: TiedBundles | Sequence[int]) -> tuple[int | None, list[int]]:
    if len(entry) == 2 and isinstance(entry[1], Sequence):
        node, local = cast("TiedBundles", entry)
        return _whole("a node", node), [_whole("a bundle index", i) for i in local]
    return None, [_whole("a bundle index", i) for i in cast("Sequence[int]", entry)]


def _whole(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | Integral):
        raise TypeError(f"{what} is a whole number, not {value!r}")
    return int(value)


def _node(by_node: Sequence[Sequence[Bundle]], node: int, number: int) -> Sequence[Bundle]:
    if not 0 <= node < len(by_node):
        raise ValueError(f"tied group {number}: there is no node {node} among {len(by_node)} with bundles")
    return by_node[node]


def final_indices(claim: Claim, facts: Sequence[WorkerFacts]) -> list[int]:
    """The bundle of each position, in the order that the cluster has once it knows its workers' devices.

    Args:
        claim: The group's bundles; told the devices.
        facts: What each position's worker said.

    Raises:
        ValueError: A bundle was known to hold another device.
    """
    devices = {p: fact.device_index for p, fact in enumerate(facts) if fact.device_index is not None}
    if devices:
        claim.learn(devices)
    elif all(fact.device_kind == "cpu" for fact in facts):
        claim.settle()  # Else the order would be another one once a group with devices has started.
    return [bundle.index for bundle in claim.bundles]


def rank_order(plan: SeatPlan, bundle_indices: Sequence[int]) -> list[int]:
    """Positions in rank order: as asked for, else as the cluster orders their bundles.

    Args:
        plan: Who sits where.
        bundle_indices: Bundle of each position, in the cluster's final order.
    """
    positions = list(range(len(plan.seats)))
    return positions if plan.ordered else sorted(positions, key=bundle_indices.__getitem__)


def assign_ranks(
    order: Sequence[int],
    facts: Sequence[WorkerFacts],
    bundle_indices: Sequence[int],
    group_name: str,
    generation: int = 0,
) -> list[RankInfo]:
    """Rank information in rank order, from where the workers really are.

    Args:
        order: Positions in rank order.
        facts: What each position's worker said.
        bundle_indices: Bundle of each position, in the cluster's final order.
        group_name: Name of the group.
        generation: Generation of the group.
    """
    local_sizes = Counter(f.node_id for f in facts)
    node_ranks: dict[str, int] = {}
    seen: Counter[str] = Counter()
    master = facts[order[0]]
    infos = []
    for rank, position in enumerate(order):
        fact = facts[position]
        infos.append(
            RankInfo(
                rank=rank,
                world_size=len(order),
                local_rank=seen[fact.node_id],
                local_world_size=local_sizes[fact.node_id],
                node_rank=node_ranks.setdefault(fact.node_id, len(node_ranks)),
                node_id=fact.node_id,
                node_address=fact.node_address,
                bundle_index=bundle_indices[position],
                device_index=fact.device_index,
                master_address=master.node_address,
                master_port=master.master_port,
                ports=fact.ports,
                group_name=group_name,
                generation=generation,
            )
        )
        seen[fact.node_id] += 1
    return infos


def rank_environment(info: RankInfo) -> dict[str, str]:
    """The variables that torch and its launchers agree on, and this package's list of leased ports."""
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.local_world_size),
        "NODE_RANK": str(info.node_rank),
        "GROUP_RANK": str(info.node_rank),
        "MASTER_ADDR": info.master_address,
        "MASTER_PORT": str(info.master_port),
        "RAYCREW_PORTS": ",".join(map(str, info.ports)),
    }
