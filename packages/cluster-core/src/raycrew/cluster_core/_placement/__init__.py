"""Bundles: what is asked for, which node takes what, allocation, and who holds a slot on which bundle."""

from typing import TYPE_CHECKING

from raycrew.cluster_core._placement.bundle_spec import BundleSpec
from raycrew.cluster_core._placement.forgetting import give_back_when_forgotten
from raycrew.cluster_core._placement.options import (
    BundleSpecs,
    ClusterOptions,
    GpuIds,
    LabelSelector,
    with_arguments_of,
)
from raycrew.cluster_core._placement.ordering import NodeOrder
from raycrew.cluster_core._placement.plan import PlacementPlan, plan_cluster
from raycrew.cluster_core._placement.request import STRATEGIES, PlacementRequest
from raycrew.cluster_core._ray import lazy

if TYPE_CHECKING:
    from raycrew.cluster_core._placement.allocation import Allocation, Allocator
    from raycrew.cluster_core._placement.claims import Claims
    from raycrew.cluster_core._placement.holding import Holding
    from raycrew.cluster_core._placement.ledger import LedgerClaim, SlotLedger

__all__ = [
    "STRATEGIES",
    "Allocation",
    "Allocator",
    "BundleSpec",
    "BundleSpecs",
    "Claims",
    "ClusterOptions",
    "GpuIds",
    "Holding",
    "LabelSelector",
    "LedgerClaim",
    "NodeOrder",
    "PlacementPlan",
    "PlacementRequest",
    "SlotLedger",
    "give_back_when_forgotten",
    "plan_cluster",
    "with_arguments_of",
]

__getattr__ = lazy(
    __name__,
    {
        "allocation": ["Allocation", "Allocator"],
        "claims": ["Claims"],
        "holding": ["Holding"],
        "ledger": ["LedgerClaim", "SlotLedger"],
    },
)
