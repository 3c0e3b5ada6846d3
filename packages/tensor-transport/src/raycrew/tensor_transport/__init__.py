"""Batches, tensor handles, transports and weight updates."""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from raycrew.tensor_transport._columns import BatchIterator, PackedSequences, PackedTensor, RaggedTensor
from raycrew.tensor_transport._handles import (
    CacheStats,
    ShardRegistry,
    TensorArguments,
    clear_node,
    collect_shards,
    flatten_shard_ids,
    localize,
    release,
    remotize,
)
from raycrew.tensor_transport._rows import ShardRead, StoreStats, TensorShardInfo
from raycrew.tensor_transport.backends.inline import InlineBackend
from raycrew.tensor_transport.backends.node_memory import NodeMemoryBackend
from raycrew.tensor_transport.backends.object_store import ObjectStoreBackend
from raycrew.tensor_transport.backends.ray_refs import RayRefBackend
from raycrew.tensor_transport.backends.shared_memory import SharedMemoryBackend
from raycrew.tensor_transport.batch import BatchedDataDict, SlicedDataDict
from raycrew.tensor_transport.errors import (
    BaseVersionError,
    BatchSchemaError,
    BucketFetchError,
    ChecksumMismatchError,
    DamagedBytesError,
    DecodeError,
    DirectoryLostError,
    GroupError,
    GroupMismatchError,
    GroupTimeoutError,
    LayoutError,
    LoadRefusedError,
    ManifestMismatchError,
    NoTransportError,
    PeerLostError,
    ReshardError,
    ShardError,
    ShardLostError,
    SourceChangedError,
    StaleGenerationError,
    StaleHandleError,
    StaleVersionError,
    StaleWeightsError,
    TransferCancelledError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
    UnsupportedTensorError,
    UpdateAbortedError,
    WeightUpdateError,
)
from raycrew.tensor_transport.packing import (
    DynamicBatchingArgs,
    Packing,
    SequencePackingArgs,
    ShardedBatch,
    balance,
    pack,
)
from raycrew.tensor_transport.protocols import ByteStore, PeerGroup, PeerResults, ShardBackend
from raycrew.tensor_transport.rtensor import RTensor
from raycrew.tensor_transport.weights import (
    RankSpan,
    RouteStore,
    SyncProgress,
    WeightDirectory,
    WeightPublisher,
    WeightReceipt,
    WeightReceiver,
    WeightRoute,
    WeightSyncReport,
    WeightUpdate,
    digest_weights,
    gather_weights,
    join_updates,
    sync_weights,
    sync_weights_async,
)
from raycrew.tensor_transport.weights.deltas import DeltaSource, DeltaTarget
from raycrew.tensor_transport.weights.resharding import (
    Layout,
    ReshardPlan,
    join_layouts,
    layout_of,
    plan_reshard,
)

__all__ = [
    "BaseVersionError",
    "BatchIterator",
    "BatchSchemaError",
    "BatchedDataDict",
    "BucketFetchError",
    "ByteStore",
    "CacheStats",
    "ChecksumMismatchError",
    "DamagedBytesError",
    "DecodeError",
    "DeltaSource",
    "DeltaTarget",
    "DirectoryLostError",
    "DynamicBatchingArgs",
    "GroupError",
    "GroupMismatchError",
    "GroupTimeoutError",
    "InlineBackend",
    "Layout",
    "LayoutError",
    "LoadRefusedError",
    "ManifestMismatchError",
    "NoTransportError",
    "NodeMemoryBackend",
    "ObjectStoreBackend",
    "PackedSequences",
    "PackedTensor",
    "Packing",
    "PeerGroup",
    "PeerLostError",
    "PeerResults",
    "RTensor",
    "RaggedTensor",
    "RankSpan",
    "RayRefBackend",
    "ReshardError",
    "ReshardPlan",
    "RouteStore",
    "SequencePackingArgs",
    "ShardBackend",
    "ShardError",
    "ShardLostError",
    "ShardRead",
    "ShardRegistry",
    "ShardedBatch",
    "SharedMemoryBackend",
    "SlicedDataDict",
    "SourceChangedError",
    "StaleGenerationError",
    "StaleHandleError",
    "StaleVersionError",
    "StaleWeightsError",
    "StoreStats",
    "SyncProgress",
    "TensorArguments",
    "TensorShardInfo",
    "TransferCancelledError",
    "TransportClosedError",
    "TransportError",
    "TransportTimeoutError",
    "UnsupportedTensorError",
    "UpdateAbortedError",
    "WeightDirectory",
    "WeightPublisher",
    "WeightReceipt",
    "WeightReceiver",
    "WeightRoute",
    "WeightSyncReport",
    "WeightUpdate",
    "WeightUpdateError",
    "balance",
    "clear_node",
    "collect_shards",
    "digest_weights",
    "flatten_shard_ids",
    "gather_weights",
    "join_layouts",
    "join_updates",
    "layout_of",
    "localize",
    "pack",
    "plan_reshard",
    "release",
    "remotize",
    "sync_weights",
    "sync_weights_async",
]

__version__: str

if not TYPE_CHECKING:  # Types are what is listed, whatever may be asked for here.

    def __getattr__(name: str) -> str:
        """The installed version, read when it is asked for."""
        if name == "__version__":
            return _version("raycrew-tensor-transport")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
