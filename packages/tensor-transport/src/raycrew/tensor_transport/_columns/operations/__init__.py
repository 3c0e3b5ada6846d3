"""What is done with a batch: its rows, columns, sequences, files, and joining with others."""

from raycrew.tensor_transport._columns.operations.joining import JoiningOperations
from raycrew.tensor_transport._columns.operations.rows import RowOperations
from raycrew.tensor_transport._columns.operations.saving import SavingOperations
from raycrew.tensor_transport._columns.operations.sequences import SequenceOperations
from raycrew.tensor_transport._columns.operations.tensordicts import TensorDictOperations

__all__ = [
    "JoiningOperations",
    "RowOperations",
    "SavingOperations",
    "SequenceOperations",
    "TensorDictOperations",
]
