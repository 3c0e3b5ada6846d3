"""The errors of shards whose bytes are not there any more."""

from collections.abc import Sequence

from raycrew.tensor_transport._rows import ShardRead, TensorShardInfo
from raycrew.tensor_transport.errors import ShardLostError, StaleHandleError


def lost(reads: Sequence[ShardRead], why: object) -> ShardLostError:
    """The error of reads that one owner can't answer any more."""
    shard = reads[0].shard
    more = f" (and {len(reads) - 1} more)" if len(reads) > 1 else ""
    return ShardLostError(f"{shard.name}{more} is lost: {why}", **shard.identity)


def stale(shard: TensorShardInfo, why: str) -> StaleHandleError:
    """The error of a handle on bytes that its owner has given up."""
    return StaleHandleError(f"{shard.name} is gone: {why}", **shard.identity)
