"""What tells the rows of one batch from those of another, at little cost: a checksum of each column."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from raycrew.tensor_transport._columns.encoding.plain_objects import to_plain
from raycrew.tensor_transport._columns.kinds import bare, kind_of, row_count
from raycrew.tensor_transport.errors import BatchSchemaError, ShardError, UnsupportedTensorError
from raycrew.tensor_transport.protocols import Bytes

_ROWS = 16
_BYTES = 16 << 20


def row_checksums(columns: Mapping[str, Any]) -> dict[str, int]:
    """For each column a checksum of its kind, dtype, shape and rows, alike in every process.

    All rows count of columns of up to about 16 MiB, and 16 rows of larger ones. Handles are read for that, as
    their shards have new names in every run that stores the same rows. Columns whose values can't be read
    from here, or have no plain bytes, are left out: handles without a registry, or with shards that were
    released or lost, and other objects.

    Raises:
        TransportError: The shards of a handle are there, and can't be read: not in time, or damaged.
    """
    found = {key: _unless_lost(key, bare(column)) for key, column in columns.items()}
    return {key: checksum for key, checksum in found.items() if checksum is not None}


def _unless_lost(key: str, column: Any) -> int | None:
    try:
        return _checksum(key, column)
    except ShardError:
        return None


def _checksum(key: str, column: Any) -> int | None:
    size = row_count(column)
    some = _some(column, np.unique(np.linspace(0, max(size - 1, 0), min(size, _ROWS)).astype(np.int64)))
    if some is None:
        return None
    try:
        text, runs = _plain(key, some, size)
        if size > _ROWS and (len(text) + sum(run.nbytes for run in runs)) * size <= _BYTES * _ROWS:
            text, runs = _plain(key, _some(column), size)
    except (BatchSchemaError, RecursionError, TypeError, UnsupportedTensorError, ValueError):
        return None
    checksum = zlib.crc32(text.encode())
    for run in runs:
        checksum = zlib.crc32(run.data, checksum)
    return checksum


def _some(column: Any, wanted: np.ndarray[Any, Any] | None = None) -> Any:
    """All rows of a column or those that are wanted, with their values; None where it names no registry."""
    kind = kind_of(column)
    rows = column if wanted is None else kind.take(column, wanted)
    if kind.name != "handle":
        return rows
    return None if column.registry is None else rows.localize()


def _plain(key: str, rows: Any, size: int) -> tuple[str, list[Bytes]]:
    kind, runs = kind_of(rows), list[Bytes]()
    parts = kind.disassemble(rows, key)
    if parts is None:
        parts = [to_plain(list(rows), key, runs)], runs
    return json.dumps([kind.name, size, parts[0]]), parts[1]
