"""The columns of several batches joined, one by one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raycrew.tensor_transport._columns.kinds import Padding, Received, bare, kind_of, row_count
from raycrew.tensor_transport._columns.naming import name_columns
from raycrew.tensor_transport.errors import BatchSchemaError


def join_columns(batches: Sequence[Mapping[str, Any]], padding: Callable[[str], Padding]) -> dict[str, Any]:
    """The rows of several batches, one after another; a batch without rows may lack columns.

    Raises:
        ValueError: There is nothing to join.
        BatchSchemaError: Columns are missing, or do not fit each other.
    """
    if not batches:
        raise ValueError("nothing to join: at least one batch is needed")
    keys = next((batch.keys() for batch in batches if _rows(batch)), max(batches, key=len).keys())
    for i, batch in enumerate(batches):
        differ = keys ^ batch.keys() if _rows(batch) else batch.keys() - keys
        if differ:
            raise BatchSchemaError(
                f"batch {i} has columns {name_columns(batch)}, the first one with rows {name_columns(keys)}",
                key=min(differ),
                expected=sorted(keys),
                actual=sorted(batch),
            )
    return {key: _join([batch[key] for batch in batches if key in batch], key, padding(key)) for key in keys}


def _rows(batch: Mapping[str, Any]) -> int:
    """Number of rows; 0 without columns."""
    return max(map(row_count, batch.values()), default=0)


def _join(columns: Sequence[Any], key: str, padding: Padding) -> Any:
    kinds = {kind_of(column) for column in columns}
    if len(kinds) > 1:
        names = sorted(kind.name for kind in kinds)
        raise BatchSchemaError(f"column {key!r} is of several kinds: {names}", key=key, actual=names)
    kind = kinds.pop()
    joined = kind.concat([bare(column) for column in columns], key, padding)
    received = any(isinstance(column, Received) for column in columns)
    return Received(joined) if received and not kind.gathers_into_new_memory else joined
