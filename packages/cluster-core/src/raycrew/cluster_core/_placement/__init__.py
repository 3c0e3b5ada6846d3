"""A cluster: its arguments, the allocation of its bundles, and who holds a slot on which of them."""

from typing import TYPE_CHECKING

from raycrew.cluster_core._ray import lazy

if TYPE_CHECKING:
    from raycrew.cluster_core._placement.indices import at
    from raycrew.cluster_core._placement.ledger import LedgerClaim, SlotLedger
    from raycrew.cluster_core._placement.virtual_cluster import RayVirtualCluster

__all__ = ["LedgerClaim", "RayVirtualCluster", "SlotLedger", "at"]

__getattr__ = lazy(
    __name__,
    {
        "indices": ["at"],
        "ledger": ["LedgerClaim", "SlotLedger"],
        "virtual_cluster": ["RayVirtualCluster"],
    },
)
