"""Columns whose rows differ in shape: ragged, and packed."""
# ruff: noqa: ARG002 - each kind uses what it needs of the common signatures.

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport._bytes import private_copy, tensor_bytes
from raycrew.tensor_transport._columns.kinds.casting import check_dtype
from raycrew.tensor_transport._columns.kinds.kinds import (
    HandleKind,
    Kind,
    Padding,
    TensorKind,
    assemble_tensor,
    describe_tensor,
)
from raycrew.tensor_transport._columns.kinds.packed import PackedTensor, common_dim, map_row, segments_of
from raycrew.tensor_transport._columns.kinds.padding import PadSide
from raycrew.tensor_transport._columns.kinds.ragged import RaggedTensor
from raycrew.tensor_transport._rows import Rows
from raycrew.tensor_transport.errors import BatchSchemaError, DecodeError
from raycrew.tensor_transport.protocols import Bytes


class RaggedKind(Kind):
    """Rows of different lengths."""

    name = "ragged"

    def size(self, column: RaggedTensor) -> int:
        return len(column)

    def take(self, column: RaggedTensor, rows: Rows) -> RaggedTensor:
        return column.take(rows)

    def concat(self, columns: Sequence[RaggedTensor], key: str, padding: Padding) -> RaggedTensor:
        return RaggedTensor.concat(columns, key)

    def to(self, column: RaggedTensor, device: torch.device, *, non_blocking: bool = False) -> RaggedTensor:
        return column.to(device, non_blocking=non_blocking)

    def cast(
        self, column: RaggedTensor, dtype: torch.dtype, key: str, *, lossy: bool = False
    ) -> RaggedTensor:
        return RaggedTensor(_cast(column.values, dtype, key, lossy=lossy), column.lengths)

    def truncate(self, column: RaggedTensor, dim: int, length: int, side: PadSide = "right") -> RaggedTensor:
        if dim == 1:
            return column.truncate(length, pad_side=side)
        kind: Kind = TensorKind() if isinstance(column.values, torch.Tensor) else HandleKind()
        return RaggedTensor(kind.truncate(column.values, dim - 1, length, side), column.lengths)

    def disassemble(self, column: RaggedTensor, key: str) -> tuple[list[Any], list[Bytes]] | None:
        if not isinstance(column.values, torch.Tensor):
            return None
        name = f"column {key!r}"
        return describe_tensor(column.values), [
            tensor_bytes(column.values, name),
            tensor_bytes(column.lengths),
        ]

    def assemble(self, params: Any, runs: Sequence[Bytes]) -> RaggedTensor:
        if len(runs) != 2 or runs[1].nbytes % 8:
            raise DecodeError(f"a ragged column has values and lengths, not {len(runs)} runs of bytes")
        lengths = assemble_tensor(["int64", [runs[1].nbytes // 8]], runs[1])
        try:
            return RaggedTensor(assemble_tensor(params, runs[0]), lengths)
        except ValueError as error:
            raise DecodeError(str(error)) from error

    def own(self, column: RaggedTensor) -> RaggedTensor:
        return RaggedTensor(_own(column.values), private_copy(column.lengths))


class PackedKind(Kind):
    """One tensor or none per row."""

    name = "packed"
    gathers_into_new_memory = False

    def size(self, column: PackedTensor) -> int:
        return len(column)

    def take(self, column: PackedTensor, rows: Rows) -> PackedTensor:
        return column.take(rows)

    def repeat(self, column: PackedTensor, times: int, *, share: bool) -> PackedTensor:
        rows = [row if share else map_row(row, _twin) for row in column.tensors for _ in range(times)]
        return PackedTensor(rows, column.dim_to_pack)

    def part_rows(self, column: PackedTensor, repeats: npt.NDArray[np.int64]) -> PackedTensor:
        for row in repeats.tolist():
            column.tensors[row] = map_row(column.tensors[row], _twin)
        return column

    def concat(self, columns: Sequence[PackedTensor], key: str, padding: Padding) -> PackedTensor:
        rows = [row for column in columns for row in column.tensors]
        try:
            if padding.value is None:
                return PackedTensor(rows, common_dim(columns))
            dim = common_dim(columns)
            return PackedTensor.padded(rows, dim, pad_value=padding.value, pad_side=padding.side)
        except ValueError as error:
            raise BatchSchemaError(f"column {key!r}: {error}", key=key) from error

    def to(self, column: PackedTensor, device: torch.device, *, non_blocking: bool = False) -> PackedTensor:
        return column.to(device, non_blocking=non_blocking)

    def cast(
        self, column: PackedTensor, dtype: torch.dtype, key: str, *, lossy: bool = False
    ) -> PackedTensor:
        check_dtype(dtype, key)
        rows = [map_row(row, lambda tensor: _cast(tensor, dtype, key, lossy=lossy)) for row in column.tensors]
        return PackedTensor(rows, column.dim_to_pack)

    def disassemble(self, column: PackedTensor, key: str) -> tuple[list[Any], list[Bytes]] | None:
        present = [segment for row in column.tensors for segment in segments_of(row)]
        if not all(isinstance(tensor, torch.Tensor) for tensor in present):
            return None
        described = [
            {"segments": list(map(describe_tensor, row))}
            if isinstance(row, tuple)
            else map_row(row, describe_tensor)
            for row in column.tensors
        ]
        return [column.dim_to_pack, described], [
            tensor_bytes(tensor, f"column {key!r}") for tensor in present
        ]

    def assemble(self, params: Any, runs: Sequence[Bytes]) -> PackedTensor:
        match params:
            case [int() as dim, list() as described]:
                pass
            case _:
                raise DecodeError(f"{params!r:.80} does not describe a packed column")
        left = iter(runs)
        try:
            column = PackedTensor([_assembled_row(row, left) for row in described], dim)
            if next(left, None) is not None:
                raise DecodeError("more bytes than a packed column has tensors")
            return column
        except DecodeError:
            raise
        except ValueError as error:
            raise DecodeError(str(error)) from error

    def own(self, column: PackedTensor) -> PackedTensor:
        return PackedTensor([map_row(row, _own) for row in column.tensors], column.dim_to_pack)


def _assembled_row(described: Any, runs: Iterator[Bytes]) -> Any:
    """A row of a packed column from the next of the runs."""
    match described:
        case None:
            return None
        case {"segments": list() as segments}:
            return tuple(_assembled_row(segment, runs) for segment in segments)
    run = next(runs, None)
    if run is None:
        raise DecodeError("fewer bytes than a packed column has tensors")
    return assemble_tensor(described, run)


def _own(values: Any) -> Any:
    """A private copy of a tensor; a handle is never written to."""
    return private_copy(values) if isinstance(values, torch.Tensor) else values


def _twin(values: Any) -> Any:
    """A copy of a tensor that gradients pass through; a handle is never written to."""
    return values.clone() if isinstance(values, torch.Tensor) else values


def _cast(values: Any, dtype: torch.dtype, key: str, *, lossy: bool) -> Any:
    kind: Kind = TensorKind() if isinstance(values, torch.Tensor) else HandleKind()
    return kind.cast(values, dtype, key, lossy=lossy)
