"""Columns of batches: their kinds, the checked table, joining, padding and frames."""

from raycrew.tensor_transport._columns.gather import gather_encoded
from raycrew.tensor_transport._columns.kinds import Padding
from raycrew.tensor_transport._columns.lengths import named_column, padded_width, row_lengths
from raycrew.tensor_transport._columns.metadata import MetadataRule, MetadataRules
from raycrew.tensor_transport._columns.naming import refuse_unknown
from raycrew.tensor_transport._columns.packed import PackedTensor
from raycrew.tensor_transport._columns.padding import Number, PadSide, check_pad_side
from raycrew.tensor_transport._columns.ragged import RaggedTensor
from raycrew.tensor_transport._columns.table import ColumnTable

__all__ = [
    "ColumnTable",
    "MetadataRule",
    "MetadataRules",
    "Number",
    "PackedTensor",
    "PadSide",
    "Padding",
    "RaggedTensor",
    "check_pad_side",
    "gather_encoded",
    "named_column",
    "padded_width",
    "refuse_unknown",
    "row_lengths",
]
