"""The kinds of column that a batch can hold, and which kind a value is."""

from raycrew.tensor_transport._columns.kinds.accepting import accept_column
from raycrew.tensor_transport._columns.kinds.columns import (
    KINDS,
    Received,
    bare,
    is_column,
    kind_of,
    row_count,
    transform,
)
from raycrew.tensor_transport._columns.kinds.kinds import Kind, Padding
from raycrew.tensor_transport._columns.kinds.packed import PackedTensor
from raycrew.tensor_transport._columns.kinds.padding import (
    Number,
    PadSide,
    check_pad_side,
    check_pad_value,
)
from raycrew.tensor_transport._columns.kinds.ragged import RaggedTensor

__all__ = [
    "KINDS",
    "Kind",
    "Number",
    "PackedTensor",
    "PadSide",
    "Padding",
    "RaggedTensor",
    "Received",
    "accept_column",
    "bare",
    "check_pad_side",
    "check_pad_value",
    "is_column",
    "kind_of",
    "row_count",
    "transform",
]
