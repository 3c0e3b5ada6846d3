"""Batches, tensor handles and weight updates."""

from raycrew.tensor_transport.errors import (
    BucketFetchError,
    ChecksumMismatchError,
    ManifestMismatchError,
    ShardError,
    ShardLostError,
    StaleHandleError,
    StaleVersionError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
    UnsupportedTensorError,
    WeightUpdateError,
)
from raycrew.tensor_transport.protocols import ByteStore, PeerGroup, PeerResults
from raycrew.tensor_transport.weights import (
    WeightPublisher,
    WeightReceipt,
    WeightReceiver,
    WeightSyncReport,
    WeightUpdate,
    gather_weights,
    sync_weights,
)

__all__ = [
    "BucketFetchError",
    "ByteStore",
    "ChecksumMismatchError",
    "ManifestMismatchError",
    "PeerGroup",
    "PeerResults",
    "ShardError",
    "ShardLostError",
    "StaleHandleError",
    "StaleVersionError",
    "TransportClosedError",
    "TransportError",
    "TransportTimeoutError",
    "UnsupportedTensorError",
    "WeightPublisher",
    "WeightReceipt",
    "WeightReceiver",
    "WeightSyncReport",
    "WeightUpdate",
    "WeightUpdateError",
    "gather_weights",
    "sync_weights",
]
