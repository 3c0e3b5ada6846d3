"""What tells the rows of one batch from those of another, at little cost: a checksum of each column."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from raycrew.tensor_transport._columns.encoding import to_plain
from raycrew.tensor_transport._columns.kinds import Kind, bare, kind_of, row_count
from raycrew.tensor_transport.errors import BatchSchemaError, UnsupportedTensorError
from raycrew.tensor_transport.protocols import Bytes

_ROWS = 16
_BYTES = 16 << 20


def row_checksums(columns: Mapping[str, Any]) -> dict[str, int]:
    """For each column a checksum of its kind, dtype, shape and rows, alike in every process.

    All rows count of columns of up to about 16 MiB, and 16 rows of larger ones. Columns whose values are not
    here, or have no plain bytes, are left out: other objects, and handles, whose shards have new names in
    every run that stores the same rows.
    """
    found = {key: _checksum(key, bare(column)) for key, column in columns.items()}
    return {key: checksum for key, checksum in found.items() if checksum is not None}


def _checksum(key: str, column: Any) -> int | None:
    kind, size = kind_of(column), row_count(column)
    if kind.name == "handle":
        return None
    some = kind.take(column, np.unique(np.linspace(0, max(size - 1, 0), min(size, _ROWS)).astype(np.int64)))
    try:
        text, runs = _plain(key, kind, some, size)
        if size > _ROWS and (len(text) + sum(run.nbytes for run in runs)) * size <= _BYTES * _ROWS:
            text, runs = _plain(key, kind, column, size)
    except (BatchSchemaError, RecursionError, TypeError, UnsupportedTensorError, ValueError):
        return None
    checksum = zlib.crc32(text.encode())
    for run in runs:
        checksum = zlib.crc32(run.data, checksum)
    return checksum


def _plain(key: str, kind: Kind, rows: Any, size: int) -> tuple[str, list[Bytes]]:
    runs: list[Bytes] = []
    parts = kind.disassemble(rows, key)
    if parts is None:
        parts = [to_plain(list(rows), key, runs)], runs
    return json.dumps([kind.name, size, parts[0]]), parts[1]
