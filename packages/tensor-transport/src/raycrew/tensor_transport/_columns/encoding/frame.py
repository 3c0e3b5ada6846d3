"""Columns as a checked header and few buffers, and back.

The header is JSON: dtypes, shapes and where each run of bytes lies. Only lists, arrays of objects and
attributes are pickled, and only if there are any.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raycrew.tensor_transport._bytes import Slot, arrange, dump, load, locate, unlocked
from raycrew.tensor_transport._columns.kinds import KINDS, Kind, Received, bare, kind_of, row_count
from raycrew.tensor_transport.errors import DecodeError
from raycrew.tensor_transport.protocols import Bytes

_FORMAT = "raycrew.columns/1"


def encode_columns(
    columns: Mapping[str, Any], rows: int, attributes: Mapping[str, Any]
) -> tuple[bytes, list[Bytes]]:
    """A header and buffers for columns and attributes; large columns stay in the memory they have."""
    described: list[list[Any]] = []
    runs: list[Bytes] = []
    objects: dict[str, Any] = {}
    for key, column in columns.items():
        value = bare(column)
        kind = kind_of(value)
        parts = kind.disassemble(value, key)
        if parts is None:
            objects[key] = value
            described.append([key, kind.name, None, 0])
        else:
            described.append([key, kind.name, parts[0], len(parts[1])])
            runs.extend(map(_locked, parts[1]) if isinstance(column, Received) else parts[1])
    pickled = 0
    if objects or attributes:
        body, found = dump((objects, dict(attributes)))
        runs.extend([np.frombuffer(body, np.uint8), *found])
        pickled = 1 + len(found)
    slots, buffers = arrange(runs)
    header = {"format": _FORMAT, "rows": rows, "columns": described, "pickled": pickled, "slots": slots}
    return json.dumps(header, separators=(",", ":")).encode(), buffers


def decode_columns(
    header: bytes, buffers: Sequence[Bytes], *, allow_pickle: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns and attributes again; columns over read-only buffers come as `Received`.

    Raises:
        DecodeError: The header or the buffers are damaged, or pickled content is not allowed.
    """
    fields = _parse(header)
    slots: list[Slot] = fields["slots"]
    runs = locate(slots, [unlocked(buffer) for buffer in buffers])
    described, pickled = fields["columns"], fields["pickled"]
    plain = len(runs) - pickled
    if pickled and not allow_pickle:
        raise DecodeError("the batch holds lists, objects or attributes, which need allow_pickle=True")
    objects, attributes = ({}, {})
    if pickled:
        body, *beside = locate(slots[plain:], buffers)
        objects, attributes = load(body.data, beside)
    columns: dict[str, Any] = {}
    start = 0
    for key, kind, params, count in described:
        if start + count > plain:
            raise DecodeError(f"column {key!r} names bytes that are not there")
        column = _column(key, kind, params, runs[start : start + count], objects)
        shared = any(not buffers[slot.buffer].flags.writeable for slot in slots[start : start + count])
        columns[key] = _received(column) if shared else column
        start += count
    if start != plain:
        raise DecodeError(f"{plain - start} runs of bytes belong to no column")
    for key, column in columns.items():
        if row_count(column) != fields["rows"]:
            raise DecodeError(f"column {key!r} has {row_count(column)} rows, the batch {fields['rows']}")
    return columns, attributes


def _column(key: str, kind_name: str, params: Any, runs: Sequence[Bytes], objects: Mapping[str, Any]) -> Any:
    kind: Kind | None = KINDS.get(kind_name)
    if kind is None:
        raise DecodeError(f"column {key!r} is of unknown kind {kind_name!r}")
    if params is None:
        if key not in objects or kind_of(objects[key]) is not kind:
            raise DecodeError(f"column {key!r}: no {kind_name} among the pickled objects")
        return objects[key]
    return kind.assemble(params, runs)


def _locked(run: Bytes) -> Bytes:
    """Bytes that others read: whoever decodes them in this process is told so, too."""
    run.flags.writeable = False
    return run


def _received(column: Any) -> Any:
    """Mark a column that lies in memory which others read too; numpy has a mark of its own."""
    if isinstance(column, np.ndarray):
        column.flags.writeable = False
        return column
    return Received(column)


def _parse(header: bytes) -> dict[str, Any]:
    """The header's fields, each of the right type."""
    try:
        fields = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not the header of a batch: {error}") from error
    match fields:
        case {
            "format": str() as form,
            "rows": int() as rows,
            "columns": list() as columns,
            "pickled": int() as pickled,
            "slots": list() as slots,
        }:
            pass
        case _:
            raise DecodeError("not the header of a batch: fields are missing or of the wrong type")
    if form != _FORMAT:
        raise DecodeError(f"the batch was encoded as {form!r}; this version reads {_FORMAT!r}")
    if rows < 0 or not 0 <= pickled <= len(slots):
        raise DecodeError(f"{rows} rows and {pickled} pickled runs among {len(slots)} do not make sense")
    return {
        "rows": rows,
        "pickled": pickled,
        "slots": [_slot(slot) for slot in slots],
        "columns": [_described(column) for column in columns],
    }


def _slot(slot: Any) -> Slot:
    match slot:
        case [int() as buffer, int() as offset, int() as size]:
            return Slot(buffer, offset, size)
    raise DecodeError(f"{slot!r} does not say where bytes lie")


def _described(column: Any) -> list[Any]:
    match column:
        case [str(), str(), _, int() as count] if count >= 0:
            return list(column)
    raise DecodeError(f"{column!r} does not describe a column")
