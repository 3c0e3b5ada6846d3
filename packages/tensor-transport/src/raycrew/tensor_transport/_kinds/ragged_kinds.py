"""Columns whose rows differ in shape: ragged, and packed."""
# ruff: noqa: ARG002 - each kind uses what it needs of the common signatures.

from collections.abc import Sequence
from typing import Any

import torch

from raycrew.tensor_transport._bytes import private_copy, tensor_bytes
from raycrew.tensor_transport._kinds.casting import check_dtype
from raycrew.tensor_transport._kinds.kinds import (
    HandleKind,
    Kind,
    Padding,
    TensorKind,
    assemble_tensor,
    describe_tensor,
)
from raycrew.tensor_transport._kinds.packed import PackedTensor
from raycrew.tensor_transport._kinds.ragged import RaggedTensor
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

    def truncate(self, column: RaggedTensor, dim: int, length: int) -> RaggedTensor:
        if dim == 1:
            return column.truncate(length)
        kind: Kind = TensorKind() if isinstance(column.values, torch.Tensor) else HandleKind()
        return RaggedTensor(kind.truncate(column.values, dim - 1, length), column.lengths)

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
        rows = [row if share else _own(row) for row in column.tensors for _ in range(times)]
        return PackedTensor(rows, column.dim_to_pack)

    def concat(self, columns: Sequence[PackedTensor], key: str, padding: Padding) -> PackedTensor:
        try:
            return PackedTensor.concat(columns)
        except ValueError as error:
            raise BatchSchemaError(f"column {key!r}: {error}", key=key) from error

    def to(self, column: PackedTensor, device: torch.device, *, non_blocking: bool = False) -> PackedTensor:
        return column.to(device, non_blocking=non_blocking)

    def cast(
        self, column: PackedTensor, dtype: torch.dtype, key: str, *, lossy: bool = False
    ) -> PackedTensor:
        check_dtype(dtype, key)
        cast = [None if row is None else _cast(row, dtype, key, lossy=lossy) for row in column.tensors]
        return PackedTensor(cast, column.dim_to_pack)

    def disassemble(self, column: PackedTensor, key: str) -> tuple[list[Any], list[Bytes]] | None:
        present = [tensor for tensor in column.tensors if tensor is not None]
        if not all(isinstance(tensor, torch.Tensor) for tensor in present):
            return None
        described = [None if tensor is None else describe_tensor(tensor) for tensor in column.tensors]
        return [column.dim_to_pack, described], [
            tensor_bytes(tensor, f"column {key!r}") for tensor in present
        ]

    def assemble(self, params: Any, runs: Sequence[Bytes]) -> PackedTensor:
        match params:
            case [int() as dim, list() as described] if len(runs) == sum(d is not None for d in described):
                pass
            case _:
                raise DecodeError(f"{len(runs)} runs of bytes do not make the packed column {params!r:.80}")
        left = iter(runs)
        try:
            return PackedTensor(
                [None if d is None else assemble_tensor(d, next(left)) for d in described], dim
            )
        except DecodeError:
            raise
        except ValueError as error:
            raise DecodeError(str(error)) from error

    def own(self, column: PackedTensor) -> PackedTensor:
        return PackedTensor([None if t is None else _own(t) for t in column.tensors], column.dim_to_pack)


def _own(values: Any) -> Any:
    """A private copy of a tensor; a handle is never written to."""
    return private_copy(values) if isinstance(values, torch.Tensor) else values


def _cast(values: Any, dtype: torch.dtype, key: str, *, lossy: bool) -> Any:
    kind: Kind = TensorKind() if isinstance(values, torch.Tensor) else HandleKind()
    return kind.cast(values, dtype, key, lossy=lossy)
