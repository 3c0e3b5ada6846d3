"""Placement groups as they are to be: pure, before any is asked of Ray."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from raycrew.cluster_core._planning import Amounts, PlacementPlan, PlacementRequest


@dataclass(frozen=True, slots=True)
class Wanted:
    """One placement group to be: its name, and per bundle the logical node, the physical one, what it holds.

    Attributes:
        seats: For each bundle, its position in the allocation.
    """

    name: str
    strategy: str
    node_indices: tuple[int, ...]
    node_ids: tuple[str, ...]
    bundles: tuple[Amounts, ...]
    seats: tuple[int, ...] = ()


def wanted_groups(
    name: str, request: PlacementRequest, plan: PlacementPlan, *, unified: bool
) -> list[Wanted]:
    """One group per logical node that has bundles, where the plan has it, or a single one of all.

    The groups, and the bundles in each, stand in the order in which Ray grants them.
    """
    seats = {
        bundle: seat
        for seat, bundle in enumerate(
            (node, position) for node, where in enumerate(plan.node_ids) for position in range(len(where))
        )
    }
    positions: dict[int, list[int]] = defaultdict(list)
    for node, position in plan.order or seats:
        positions[node].append(position)
    groups = []
    for node, order in positions.items():
        held, node_ids = request.bundles_of(node), plan.node_ids[node]
        groups.append(
            Wanted(
                f"{name}-node{node}",
                request.strategy,
                (node,) * len(order),
                tuple(node_ids[position] for position in order),
                tuple(held[position] for position in order),
                tuple(seats[node, position] for position in order),
            )
        )
    return [_united(name, groups)] if unified else groups


def unplaced_group(name: str, request: PlacementRequest, node: int) -> Wanted:
    """The group of one logical node, wherever it fits."""
    bundles = request.bundles_of(node)
    return Wanted(
        f"{name}-wanted{node}", request.strategy, (node,) * request.bundle_counts[node], (), bundles
    )


def _united(name: str, groups: Sequence[Wanted]) -> Wanted:
    """One placement group in place of several."""
    return Wanted(
        name,
        "PACK",
        tuple(index for one in groups for index in one.node_indices),
        tuple(node_id for one in groups for node_id in one.node_ids),
        tuple(bundle for one in groups for bundle in one.bundles),
        tuple(seat for one in groups for seat in one.seats),
    )


def devices_of(wanted: Wanted, gpu_ids: tuple[tuple[int, ...], ...]) -> dict[str, list[int]]:
    """The devices that a group is to get, by node id."""
    devices: dict[str, list[int]] = defaultdict(list)
    for node_index, node_id in dict(zip(wanted.node_indices, wanted.node_ids, strict=True)).items():
        devices[node_id] += gpu_ids[node_index]
    return devices
