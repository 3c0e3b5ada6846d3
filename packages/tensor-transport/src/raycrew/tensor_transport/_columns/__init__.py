"""Columns of batches: their kinds, the checked table, joining, padding and frames."""

from raycrew.tensor_transport._columns.gather import gather_encoded
from raycrew.tensor_transport._columns.lengths import named_column, padded_width, row_lengths
from raycrew.tensor_transport._columns.metadata import MetadataRule, MetadataRules
from raycrew.tensor_transport._columns.naming import refuse_unknown
from raycrew.tensor_transport._columns.table import ColumnTable

__all__ = [
    "ColumnTable",
    "MetadataRule",
    "MetadataRules",
    "gather_encoded",
    "named_column",
    "padded_width",
    "refuse_unknown",
    "row_lengths",
]
