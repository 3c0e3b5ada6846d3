"""Sequences into bins of a token budget, bins onto ranks, and rows into shards and microbatches."""

from raycrew.tensor_transport.packing._bins import ALGORITHMS, Packing, balance, pack
from raycrew.tensor_transport.packing._plan import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    Share,
    all_keys,
    check_batch_size,
    dynamic_shares,
    even_rows,
    only_plan,
    packed_shares,
)
from raycrew.tensor_transport.packing._sharded import ShardedBatch

__all__ = [
    "ALGORITHMS",
    "DynamicBatchingArgs",
    "Packing",
    "SequencePackingArgs",
    "ShardedBatch",
    "Share",
    "all_keys",
    "balance",
    "check_batch_size",
    "dynamic_shares",
    "even_rows",
    "only_plan",
    "pack",
    "packed_shares",
]
