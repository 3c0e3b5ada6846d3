"""Weights from shard to shard: layouts as data, the plan that follows from two of them, and its execution."""

from raycrew.tensor_transport.resharding._boxes import Block, Box, Region
from raycrew.tensor_transport.resharding._builders import (
    Split,
    flat_sharded,
    on_mesh,
    qkv_parts,
    replicated,
    sharded,
)
from raycrew.tensor_transport.resharding._fusing import fused, stacked
from raycrew.tensor_transport.resharding._layout import Layout, Memory, Share, TensorLayout, join_layouts
from raycrew.tensor_transport.resharding._moving import (
    ReshardReceipt,
    ShardOffers,
    offer_shards,
    pull_shards,
)
from raycrew.tensor_transport.resharding._plan import Move, ReshardPlan, plan_reshard
from raycrew.tensor_transport.resharding._reading import layout_of

__all__ = [
    "Block",
    "Box",
    "Layout",
    "Memory",
    "Move",
    "Region",
    "ReshardPlan",
    "ReshardReceipt",
    "ShardOffers",
    "Share",
    "Split",
    "TensorLayout",
    "flat_sharded",
    "fused",
    "join_layouts",
    "layout_of",
    "offer_shards",
    "on_mesh",
    "plan_reshard",
    "pull_shards",
    "qkv_parts",
    "replicated",
    "sharded",
    "stacked",
]
