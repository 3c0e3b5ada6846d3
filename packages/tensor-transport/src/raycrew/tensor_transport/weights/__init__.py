"""Weights from trainer to generator, as versioned updates that are applied whole or not at all."""

from raycrew.tensor_transport.weights._checksum import digest_weights
from raycrew.tensor_transport.weights._directory import WeightDirectory
from raycrew.tensor_transport.weights._manifest import (
    Bucket,
    BucketPlan,
    TensorEntry,
    WeightUpdate,
    join_updates,
)
from raycrew.tensor_transport.weights._publisher import WeightPublisher
from raycrew.tensor_transport.weights._receipt import WeightReceipt
from raycrew.tensor_transport.weights._receiver import WeightReceiver
from raycrew.tensor_transport.weights._report import RankSpan, SyncProgress, WeightSyncReport
from raycrew.tensor_transport.weights._source import gather_weights
from raycrew.tensor_transport.weights._spans import Span
from raycrew.tensor_transport.weights._sync import sync_weights, sync_weights_async
from raycrew.tensor_transport.weights._versions import VersionStatus

__all__ = [
    "Bucket",
    "BucketPlan",
    "RankSpan",
    "Span",
    "SyncProgress",
    "TensorEntry",
    "VersionStatus",
    "WeightDirectory",
    "WeightPublisher",
    "WeightReceipt",
    "WeightReceiver",
    "WeightSyncReport",
    "WeightUpdate",
    "digest_weights",
    "gather_weights",
    "join_updates",
    "sync_weights",
    "sync_weights_async",
]
