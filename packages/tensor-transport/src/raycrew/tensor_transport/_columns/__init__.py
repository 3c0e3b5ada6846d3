"""Columns of batches: their kinds, the checked table and its operations, joining, padding and frames."""

from raycrew.tensor_transport._columns.encoding import row_checksums
from raycrew.tensor_transport._columns.iterating import BatchIterator
from raycrew.tensor_transport._columns.kinds import PackedTensor, PadSide, RaggedTensor, check_pad_side
from raycrew.tensor_transport._columns.lengths import as_wide, named_column, padded_width, row_lengths
from raycrew.tensor_transport._columns.naming import refuse_unknown
from raycrew.tensor_transport._columns.operations import (
    JoiningOperations,
    RowOperations,
    SavingOperations,
    SequenceOperations,
    TensorDictOperations,
)
from raycrew.tensor_transport._columns.sequences import PackedSequences

__all__ = [
    "BatchIterator",
    "JoiningOperations",
    "PackedSequences",
    "PackedTensor",
    "PadSide",
    "RaggedTensor",
    "RowOperations",
    "SavingOperations",
    "SequenceOperations",
    "TensorDictOperations",
    "as_wide",
    "check_pad_side",
    "named_column",
    "padded_width",
    "refuse_unknown",
    "row_checksums",
    "row_lengths",
]
