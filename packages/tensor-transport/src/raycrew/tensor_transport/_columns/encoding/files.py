"""Batches in files: safetensors with JSON in it, written whole or not at all, read without unpickling."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raycrew.tensor_transport._bytes import (
    SAFETENSORS_DTYPES,
    Slot,
    arrange,
    frame,
    header_length,
    locate,
    parse_header,
    tensor_over,
    write_whole,
)
from raycrew.tensor_transport._columns.encoding.plain_objects import from_plain, to_plain, why_not_plain
from raycrew.tensor_transport._columns.kinds import KINDS, RaggedTensor, bare, kind_of, row_count
from raycrew.tensor_transport.errors import BatchSchemaError, DecodeError
from raycrew.tensor_transport.protocols import Bytes

_FORMAT = "raycrew.batch/1"
_BODY, _BESIDE = "raycrew/json", "raycrew/bytes"
_RESERVED = ("raycrew/", "__metadata__")


def write_columns(path: Path, columns: Mapping[str, Any], rows: int, attributes: Mapping[str, Any]) -> None:
    """Save columns and attributes: what has plain bytes under the columns' names, all else beside it.

    Raises:
        BatchSchemaError: Something can't be saved; nothing is written.
        UnsupportedTensorError: A tensor has no plain bytes.
    """
    tensors: dict[str, torch.Tensor] = {}
    runs: list[Bytes] = []
    described: list[Any] = []
    try:
        for key, column in columns.items():
            described.append([key, *_describe(key, bare(column), tensors, runs)])
        plain = to_plain(dict(attributes), "the batch", runs)
        slots, buffers = arrange(runs)
        fields = {"format": _FORMAT, "rows": rows, "columns": described, "attributes": plain, "slots": slots}
        body = np.frombuffer(json.dumps(fields, separators=(",", ":"), allow_nan=False).encode(), np.uint8)
    except (RecursionError, ValueError) as error:
        if isinstance(error, BatchSchemaError):
            raise
        raise BatchSchemaError(f"the batch can't be saved as JSON: {error}") from error
    for i, buffer in enumerate(buffers):
        tensors[f"{_BESIDE}/{i}"] = tensor_over(buffer, torch.uint8, [buffer.nbytes])
    tensors[_BODY] = tensor_over(body, torch.uint8, [body.nbytes])
    start, parts = frame(tensors, {"format": _FORMAT})
    header_length(start[:8])
    write_whole(path, [start, *parts])


def _describe(
    key: str, column: Any, tensors: dict[str, torch.Tensor], runs: list[Bytes]
) -> tuple[str, Any, Any]:
    """A column's kind and parameters, and the names of its bytes, or how many runs of them lie beside."""
    kind, name = kind_of(column), f"column {key!r}"
    if kind.name == "list" or (kind.name == "array" and column.dtype == object):
        return kind.name, to_plain(column, name, runs), None
    parts = kind.disassemble(column, key)
    if parts is None:
        raise BatchSchemaError(f"{name} {why_not_plain(column)}", key=key)
    names = [key, f"{key}/lengths"][: len(parts[1])]
    taken = any(name in tensors or name.startswith(_RESERVED) for name in names)
    if kind.name == "packed" or taken:
        runs.extend(parts[1])
        return kind.name, parts[0], len(parts[1])
    tensors.update(zip(names, _as_tensors(column, parts[1]), strict=True))
    return kind.name, parts[0], names


def _as_tensors(column: Any, runs: Sequence[Bytes]) -> Iterator[torch.Tensor]:
    """A column's runs as tensors that other readers understand, else as their bytes."""
    values = column.values if isinstance(column, RaggedTensor) else column
    dtype = getattr(torch, str(values.dtype).removeprefix("torch."), None)
    if dtype is None or dtype not in SAFETENSORS_DTYPES:
        yield tensor_over(runs[0], torch.uint8, [runs[0].nbytes])
    else:
        yield tensor_over(runs[0], dtype, values.shape)
    for run in runs[1:]:
        yield tensor_over(run, torch.int64, [run.nbytes // 8])


def read_columns(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns and attributes that `write_columns` saved, in memory of this process.

    Raises:
        DecodeError: The file is damaged, or no such file; nothing of it is used.
        OSError: It can't be read.
    """
    found = _read(path)
    try:
        return _decode(found)
    except DecodeError as error:
        raise DecodeError(f"{path}: {error}") from error
    except (
        ArithmeticError,
        LookupError,
        MemoryError,
        RecursionError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise DecodeError(f"{path} is damaged, or no saved batch: {error}") from error


def _decode(found: Mapping[str, Bytes]) -> tuple[dict[str, Any], dict[str, Any]]:
    if _BODY not in found:
        raise DecodeError("it is no saved batch")
    match json.loads(found[_BODY].tobytes()):
        case {"format": str() as form} if form != _FORMAT:
            raise DecodeError(f"it was saved as {form!r}; this version reads {_FORMAT!r}")
        case {
            "rows": int() as rows,
            "columns": list() as described,
            "attributes": dict() as plain,
            "slots": list() as slots,
        }:
            pass
        case _:
            raise DecodeError("fields are missing or of the wrong type")
    buffers = [found[f"{_BESIDE}/{i}"] for i in range(sum(name.startswith(f"{_BESIDE}/") for name in found))]
    runs = iter(locate([_slot(slot) for slot in slots], buffers))
    unread = {name for name in found if not name.startswith((_BODY, f"{_BESIDE}/"))}

    def take(count: int) -> list[Bytes]:
        taken = [run for _, run in zip(range(count), runs, strict=False)]
        if len(taken) != count:
            raise DecodeError(f"{count} runs of bytes are named, and {len(taken)} are left")
        return taken

    columns: dict[str, Any] = {}
    for item in described:
        match item:
            case [str() as key, str() as kind, params, where] if key not in columns and kind in KINDS:
                pass
            case _:
                raise DecodeError(f"{item!r:.80} does not describe a column, or does so twice")
        if where is None:
            column = from_plain(params, take)
        elif isinstance(where, int):
            column = KINDS[kind].assemble(params, take(where))
        else:
            column = KINDS[kind].assemble(params, [found[name] for name in where])
            unread -= set(where)
        if kind_of(column).name != kind or row_count(column) != rows:
            raise DecodeError(f"column {key!r} is no {kind} of {rows} rows")
        columns[key] = column
    attributes = from_plain(plain, take)
    if unread or next(runs, None) is not None:
        raise DecodeError(f"bytes belong to no column: {sorted(unread)[:3]}")
    return columns, attributes


def _slot(slot: Any) -> Slot:
    match slot:
        case [int() as buffer, int() as offset, int() as size]:
            return Slot(buffer, offset, size)
    raise DecodeError(f"{slot!r:.80} does not say where bytes lie")


def _read(path: Path) -> dict[str, Bytes]:
    """What a safetensors file holds, by name.

    Raises:
        DecodeError: It is none, or is truncated or too long.
    """
    if path.exists() and not path.is_file():  # A pipe would be waited for.
        raise DecodeError(f"{path} is no file")
    with path.open("rb") as file:
        actual = os.fstat(file.fileno()).st_size
        try:
            length = header_length(file.read(8))
            entries = parse_header(file.read(length))
        except (DecodeError, RecursionError) as error:
            raise DecodeError(f"{path} is damaged, or no safetensors file: {error}") from error
        size = sum(entry.size_bytes for entry in entries)
        if actual != 8 + length + size:
            raise DecodeError(f"{path} has {actual} bytes, and its header names {8 + length + size}")
        data = np.empty(size, np.uint8)
        if file.readinto(data.data) != size:
            raise DecodeError(f"{path} ended while it was read")
    ends = np.cumsum([0, *(entry.size_bytes for entry in entries)]).tolist()
    return {
        entry.name: data[start:end] for entry, start, end in zip(entries, ends[:-1], ends[1:], strict=True)
    }
