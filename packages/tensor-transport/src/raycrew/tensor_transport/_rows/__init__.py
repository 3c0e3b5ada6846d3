"""Which rows, by every way to name them, views on runs of them, and the shards that hold them."""

from raycrew.tensor_transport._rows.arrays import refuse_special_array
from raycrew.tensor_transport._rows.counts import whole_number
from raycrew.tensor_transport._rows.indexing import (
    RowIndex,
    Rows,
    check_permutation,
    even_bounds,
    inverse_permutation,
    is_contiguous,
    normalize_rows,
    padding_of_joined,
    padding_within,
    repeats,
    row_numbers,
    run_bounds,
)
from raycrew.tensor_transport._rows.joining import join_rows
from raycrew.tensor_transport._rows.passes import Passes
from raycrew.tensor_transport._rows.shards import (
    ShardRead,
    StoreStats,
    TensorShardInfo,
    dtype_name,
    new_shard_id,
    total,
)
from raycrew.tensor_transport._rows.views import RowView, ShardRows
from raycrew.tensor_transport._rows.windows import Window

__all__ = [
    "Passes",
    "RowIndex",
    "RowView",
    "Rows",
    "ShardRead",
    "ShardRows",
    "StoreStats",
    "TensorShardInfo",
    "Window",
    "check_permutation",
    "dtype_name",
    "even_bounds",
    "inverse_permutation",
    "is_contiguous",
    "join_rows",
    "new_shard_id",
    "normalize_rows",
    "padding_of_joined",
    "padding_within",
    "refuse_special_array",
    "repeats",
    "row_numbers",
    "run_bounds",
    "total",
    "whole_number",
]
