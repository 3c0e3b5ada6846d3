"""Several batches made one: their columns, their metadata, and those of all ranks."""

from raycrew.tensor_transport._columns.joining.columns import join_columns
from raycrew.tensor_transport._columns.joining.gather import gather_encoded
from raycrew.tensor_transport._columns.joining.metadata import (
    MetadataRules,
    join_metadata,
    rules_for,
)

__all__ = [
    "MetadataRules",
    "gather_encoded",
    "join_columns",
    "join_metadata",
    "rules_for",
]
