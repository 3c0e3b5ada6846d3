"""Bundles: the arguments of a cluster, allocation, and who holds a slot on which bundle."""

from typing import TYPE_CHECKING

from raycrew.cluster_core._placement.forgetting import give_back_when_forgotten
from raycrew.cluster_core._placement.options import (
    BundleSpecs,
    ClusterOptions,
    GpuIds,
    LabelSelector,
)
from raycrew.cluster_core._placement.signatures import with_arguments_of
from raycrew.cluster_core._ray import lazy

if TYPE_CHECKING:
    from raycrew.cluster_core._placement.allocation import Allocation, Allocator
    from raycrew.cluster_core._placement.claims import Claims
    from raycrew.cluster_core._placement.holding import Holding
    from raycrew.cluster_core._placement.ledger import LedgerClaim, SlotLedger

__all__ = [
    "Allocation",
    "Allocator",
    "BundleSpecs",
    "Claims",
    "ClusterOptions",
    "GpuIds",
    "Holding",
    "LabelSelector",
    "LedgerClaim",
    "SlotLedger",
    "give_back_when_forgotten",
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
