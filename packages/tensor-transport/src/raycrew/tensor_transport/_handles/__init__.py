"""Reading handles: from names of shards to tensors, in nested objects and in arguments of calls."""

from raycrew.tensor_transport._handles.arguments import TensorArguments
from raycrew.tensor_transport._handles.cache import CacheStats
from raycrew.tensor_transport._handles.registry import ShardRegistry
from raycrew.tensor_transport._handles.walk import (
    clear_node,
    collect_shards,
    flatten_shard_ids,
    localize,
    release,
    remotize,
)

__all__ = [
    "CacheStats",
    "ShardRegistry",
    "TensorArguments",
    "clear_node",
    "collect_shards",
    "flatten_shard_ids",
    "localize",
    "release",
    "remotize",
]
