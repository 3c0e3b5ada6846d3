"""Weights from trainer to generator, as versioned updates that are applied whole or not at all."""

from raycrew.tensor_transport.weights._manifest import Bucket, TensorEntry, WeightUpdate
from raycrew.tensor_transport.weights._publisher import WeightPublisher
from raycrew.tensor_transport.weights._receiver import WeightReceipt, WeightReceiver
from raycrew.tensor_transport.weights._source import gather_weights
from raycrew.tensor_transport.weights._sync import WeightSyncReport, sync_weights

__all__ = [
    "Bucket",
    "TensorEntry",
    "WeightPublisher",
    "WeightReceipt",
    "WeightReceiver",
    "WeightSyncReport",
    "WeightUpdate",
    "gather_weights",
    "sync_weights",
]
