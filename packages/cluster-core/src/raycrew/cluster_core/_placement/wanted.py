"""Placement groups as they are to be: pure, before any is asked of Ray."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from raycrew.cluster_core._planning import Amounts, PlacementPlan, PlacementRequest


@dataclass(frozen=True, slots=True)
class Wanted:
    """One placement group to be: its name, the logical node of each bundle, and the physical one."""

    name: str
    strategy: str
    node_indices: tuple[int, ...]
    node_ids: tuple[str, ...]
    bundles: tuple[Amounts, ...]


def wanted_groups(
    name: str, request: PlacementRequest, plan: PlacementPlan, *, unified: bool
) -> list[Wanted]:
    """One group per logical node that has bundles, where the plan has it, or a single one of all."""
    groups = [
        Wanted(
            f"{name}-node{node}",
            request.strategy,
            (node,) * len(node_ids),
            node_ids,
            request.bundles_of(node),
        )
        for node, node_ids in enumerate(plan.node_ids)
        if node_ids
    ]
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
    )


def devices_of(wanted: Wanted, gpu_ids: tuple[tuple[int, ...], ...]) -> dict[str, list[int]]:
    """The devices that a group is to get, by node id."""
    devices: dict[str, list[int]] = defaultdict(list)
    for node_index, node_id in dict(zip(wanted.node_indices, wanted.node_ids, strict=True)).items():
        devices[node_id] += gpu_ids[node_index]
    return devices
