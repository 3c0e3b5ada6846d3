"""What tells the rows of one batch from those of another, at little cost: a checksum of a few of them."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from raycrew.tensor_transport._columns.encoding import to_plain
from raycrew.tensor_transport._columns.kinds import bare, kind_of, row_count
from raycrew.tensor_transport.errors import BatchSchemaError, UnsupportedTensorError
from raycrew.tensor_transport.protocols import Bytes

_ROWS = 16


def row_checksums(columns: Mapping[str, Any]) -> dict[str, int]:
    """For each column a checksum of its kind, dtype, shape and a few of its rows, alike in every process.

    Columns whose values are not here, or have no plain bytes, are left out: handles, other objects.
    """
    found = {key: _checksum(key, bare(column)) for key, column in columns.items()}
    return {key: checksum for key, checksum in found.items() if checksum is not None}


def _checksum(key: str, column: Any) -> int | None:
    kind, size = kind_of(column), row_count(column)
    if kind.name == "handle":
        return None
    some = kind.take(column, np.unique(np.linspace(0, max(size - 1, 0), min(size, _ROWS)).astype(np.int64)))
    runs: list[Bytes] = []
    try:
        parts = kind.disassemble(some, key)
        if parts is None:
            parts = [to_plain(list(some), key, runs)], runs
        text = json.dumps([kind.name, size, parts[0]])
    except (BatchSchemaError, RecursionError, TypeError, UnsupportedTensorError, ValueError):
        return None
    checksum = zlib.crc32(text.encode())
    for run in parts[1]:
        checksum = zlib.crc32(run.data, checksum)
    return checksum
