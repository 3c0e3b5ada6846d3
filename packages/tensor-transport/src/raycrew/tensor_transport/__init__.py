"""Batches, tensor handles, transports and weight updates."""

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
from raycrew.tensor_transport._kinds import PackedTensor, RaggedTensor
from raycrew.tensor_transport._shards import ShardRead, StoreStats, TensorShardInfo
from raycrew.tensor_transport.backends.inline import InlineBackend
from raycrew.tensor_transport.backends.node_memory import NodeMemoryBackend
from raycrew.tensor_transport.backends.object_store import ObjectStoreBackend
from raycrew.tensor_transport.backends.ray_refs import RayRefBackend
from raycrew.tensor_transport.backends.shared_memory import SharedMemoryBackend
from raycrew.tensor_transport.batch import BatchedDataDict, SlicedDataDict
from raycrew.tensor_transport.errors import (
    BatchSchemaError,
    BucketFetchError,
    ChecksumMismatchError,
    DamagedBytesError,
    DecodeError,
    LayoutError,
    ManifestMismatchError,
    NoTransportError,
    ReshardError,
    ShardError,
    ShardLostError,
    SourceChangedError,
    StaleHandleError,
    StaleVersionError,
    TransferCancelledError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
    UnsupportedTensorError,
    WeightUpdateError,
)
from raycrew.tensor_transport.packing import Packing, balance, pack
from raycrew.tensor_transport.packing._plan import DynamicBatchingArgs, SequencePackingArgs
from raycrew.tensor_transport.packing._sharded import ShardedBatch
from raycrew.tensor_transport.protocols import ByteStore, PeerGroup, PeerResults, ShardBackend
from raycrew.tensor_transport.resharding import Layout, ReshardPlan, join_layouts, layout_of, plan_reshard
from raycrew.tensor_transport.rtensor import RTensor
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
    "BatchSchemaError",
    "BatchedDataDict",
    "BucketFetchError",
    "ByteStore",
    "CacheStats",
    "ChecksumMismatchError",
    "DamagedBytesError",
    "DecodeError",
    "DynamicBatchingArgs",
    "InlineBackend",
    "Layout",
    "LayoutError",
    "ManifestMismatchError",
    "NoTransportError",
    "NodeMemoryBackend",
    "ObjectStoreBackend",
    "PackedTensor",
    "Packing",
    "PeerGroup",
    "PeerResults",
    "RTensor",
    "RaggedTensor",
    "RayRefBackend",
    "ReshardError",
    "ReshardPlan",
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
    "StaleHandleError",
    "StaleVersionError",
    "StoreStats",
    "TensorArguments",
    "TensorShardInfo",
    "TransferCancelledError",
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
    "balance",
    "clear_node",
    "collect_shards",
    "flatten_shard_ids",
    "gather_weights",
    "join_layouts",
    "layout_of",
    "localize",
    "pack",
    "plan_reshard",
    "release",
    "remotize",
    "sync_weights",
]
