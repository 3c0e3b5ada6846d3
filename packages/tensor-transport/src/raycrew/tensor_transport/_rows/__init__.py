"""Which rows: one normaliser for every way to name them, and views on runs of them."""

from raycrew.tensor_transport._rows.arrays import refuse_special_array
from raycrew.tensor_transport._rows.indexing import (
    RowIndex,
    Rows,
    check_permutation,
    even_bounds,
    inverse_permutation,
    is_contiguous,
    normalize_rows,
    row_numbers,
)
from raycrew.tensor_transport._rows.passes import Passes
from raycrew.tensor_transport._rows.views import RowView, ShardRows

__all__ = [
    "Passes",
    "RowIndex",
    "RowView",
    "Rows",
    "ShardRows",
    "check_permutation",
    "even_bounds",
    "inverse_permutation",
    "is_contiguous",
    "normalize_rows",
    "refuse_special_array",
    "row_numbers",
]
