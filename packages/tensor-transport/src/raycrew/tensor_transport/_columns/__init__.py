"""Columns of batches: their kinds, the checked table, joining, padding and frames."""

from raycrew.tensor_transport._columns.columns import bare
from raycrew.tensor_transport._columns.gather import gather_encoded
from raycrew.tensor_transport._columns.kinds import Padding
from raycrew.tensor_transport._columns.packed import PackedTensor
from raycrew.tensor_transport._columns.padding import Number, PadSide, check_pad_side
from raycrew.tensor_transport._columns.ragged import RaggedTensor
from raycrew.tensor_transport._columns.table import ColumnTable

__all__ = [
    "ColumnTable",
    "Number",
    "PackedTensor",
    "PadSide",
    "Padding",
    "RaggedTensor",
    "bare",
    "check_pad_side",
    "gather_encoded",
]
