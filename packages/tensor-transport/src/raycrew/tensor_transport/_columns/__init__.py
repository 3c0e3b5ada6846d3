"""Columns of batches: their kinds, the checked table and its operations, joining, padding and frames."""

from raycrew.tensor_transport._columns.column_operations import ColumnOperations
from raycrew.tensor_transport._columns.iterating import BatchIterator
from raycrew.tensor_transport._columns.joining_operations import JoiningOperations
from raycrew.tensor_transport._columns.lengths import named_column, padded_width, row_lengths
from raycrew.tensor_transport._columns.metadata import MetadataRule, MetadataRules
from raycrew.tensor_transport._columns.naming import refuse_unknown
from raycrew.tensor_transport._columns.row_operations import RowOperations
from raycrew.tensor_transport._columns.saving_operations import SavingOperations
from raycrew.tensor_transport._columns.sequence_operations import SequenceOperations
from raycrew.tensor_transport._columns.sequences import PackedSequences
from raycrew.tensor_transport._columns.tensordicts import TensorDictOperations

__all__ = [
    "BatchIterator",
    "ColumnOperations",
    "JoiningOperations",
    "MetadataRule",
    "MetadataRules",
    "PackedSequences",
    "RowOperations",
    "SavingOperations",
    "SequenceOperations",
    "TensorDictOperations",
    "named_column",
    "padded_width",
    "refuse_unknown",
    "row_lengths",
]
