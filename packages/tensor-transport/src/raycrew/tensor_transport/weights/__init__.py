"""Weights from trainer to generator, as versioned updates that are applied whole or not at all."""

from raycrew.tensor_transport.weights._directory import VersionStatus, WeightDirectory
from raycrew.tensor_transport.weights._publishing import WeightPublisher, gather_weights
from raycrew.tensor_transport.weights._receiving import WeightReceipt, WeightReceiver
from raycrew.tensor_transport.weights._routing import RouteStore
from raycrew.tensor_transport.weights._syncing import (
    RankSpan,
    SyncProgress,
    WeightRoute,
    WeightSyncReport,
    sync_weights,
    sync_weights_async,
)
from raycrew.tensor_transport.weights._update import (
    Bucket,
    BucketPlan,
    Span,
    TensorEntry,
    WeightUpdate,
    digest_weights,
    join_updates,
)

__all__ = [
    "Bucket",
    "BucketPlan",
    "RankSpan",
    "RouteStore",
    "Span",
    "SyncProgress",
    "TensorEntry",
    "VersionStatus",
    "WeightDirectory",
    "WeightPublisher",
    "WeightReceipt",
    "WeightReceiver",
    "WeightRoute",
    "WeightSyncReport",
    "WeightUpdate",
    "digest_weights",
    "gather_weights",
    "join_updates",
    "sync_weights",
    "sync_weights_async",
]
