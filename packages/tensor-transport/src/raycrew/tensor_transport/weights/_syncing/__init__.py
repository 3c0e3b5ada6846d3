"""The driver's side: all ranks publish and apply one version, with a report."""

from raycrew.tensor_transport.weights._syncing.report import RankSpan, SyncProgress, WeightSyncReport
from raycrew.tensor_transport.weights._syncing.routing import WeightRoute
from raycrew.tensor_transport.weights._syncing.sync import sync_weights, sync_weights_async

__all__ = [
    "RankSpan",
    "SyncProgress",
    "WeightRoute",
    "WeightSyncReport",
    "sync_weights",
    "sync_weights_async",
]
