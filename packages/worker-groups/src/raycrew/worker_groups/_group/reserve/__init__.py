"""What a group keeps for ranks that are lost: spare bundles, and workers that stand by on some of them."""

from raycrew.worker_groups._group.reserve.keeping import Reserve
from raycrew.worker_groups._group.reserve.spare import Spare

__all__ = ["Reserve", "Spare"]
