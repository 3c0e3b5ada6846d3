"""The columns of several batches joined, one by one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from raycrew.tensor_transport._columns.columns import Received, bare, kind_of
from raycrew.tensor_transport._columns.kinds import Padding
from raycrew.tensor_transport.errors import BatchSchemaError


def join_columns(batches: Sequence[Mapping[str, Any]], padding: Callable[[str], Padding]) -> dict[str, Any]:
    """The rows of several batches, one after another.

    Raises:
        ValueError: There is nothing to join.
        BatchSchemaError: Columns are missing, or do not fit each other.
    """
    if not batches:
        raise ValueError("nothing to join: at least one batch is needed")
    keys = batches[0].keys()
    for i, batch in enumerate(batches):
        if differ := keys ^ batch.keys():
            raise BatchSchemaError(
                f"batch {i} has columns {name_columns(batch)}, the first one {name_columns(keys)}",
                key=min(differ),
                expected=sorted(keys),
                actual=sorted(batch),
            )
    return {key: _join([batch[key] for batch in batches], key, padding(key)) for key in keys}


def name_columns(keys: Iterable[str]) -> str:
    """Some columns' names, for an error."""
    names = sorted(keys)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _join(columns: Sequence[Any], key: str, padding: Padding) -> Any:
    kinds = {kind_of(column) for column in columns}
    if len(kinds) > 1:
        names = sorted(kind.name for kind in kinds)
        raise BatchSchemaError(f"column {key!r} is of several kinds: {names}", key=key, actual=names)
    kind = kinds.pop()
    joined = kind.concat([bare(column) for column in columns], key, padding)
    received = any(isinstance(column, Received) for column in columns)
    return Received(joined) if received and not kind.gathers_into_new_memory else joined
