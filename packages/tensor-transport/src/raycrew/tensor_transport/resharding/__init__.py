"""Weights from shard to shard: layouts as data, and the plan that follows from two of them."""

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
    "Share",
    "Split",
    "TensorLayout",
    "flat_sharded",
    "fused",
    "join_layouts",
    "layout_of",
    "on_mesh",
    "plan_reshard",
    "qkv_parts",
    "replicated",
    "sharded",
    "stacked",
]
