"""Who holds which part of which tensor: boxes, layouts, and where layouts come from."""

from raycrew.tensor_transport.weights.resharding._layouts.boxes import (
    Block,
    Box,
    Region,
    Shape,
    coalesce,
    contains,
    contiguous_runs,
    covered_once,
    dense_strides,
    dot,
    intersect,
    subtract,
)
from raycrew.tensor_transport.weights.resharding._layouts.builders import (
    Split,
    flat_sharded,
    on_mesh,
    qkv_parts,
    replicated,
    sharded,
)
from raycrew.tensor_transport.weights.resharding._layouts.fusing import fused, stacked
from raycrew.tensor_transport.weights.resharding._layouts.layout import (
    Layout,
    Memory,
    Share,
    TensorLayout,
    itemsize_of,
    join_layouts,
)
from raycrew.tensor_transport.weights.resharding._layouts.reading import layout_of, local_tensor, place_of

__all__ = [
    "Block",
    "Box",
    "Layout",
    "Memory",
    "Region",
    "Shape",
    "Share",
    "Split",
    "TensorLayout",
    "coalesce",
    "contains",
    "contiguous_runs",
    "covered_once",
    "dense_strides",
    "dot",
    "flat_sharded",
    "fused",
    "intersect",
    "itemsize_of",
    "join_layouts",
    "layout_of",
    "local_tensor",
    "on_mesh",
    "place_of",
    "qkv_parts",
    "replicated",
    "sharded",
    "stacked",
    "subtract",
]
