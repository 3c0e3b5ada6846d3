"""The kinds of column that a batch can hold, each with the same few operations."""
# ruff: noqa: ARG002 - each kind uses what it needs of the common signatures.

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport._bytes import (
    array_bytes,
    array_over,
    check_size,
    has_plain_bytes,
    parse_numpy_dtype,
    parse_torch_dtype,
    private_copy,
    tensor_bytes,
    tensor_over,
)
from raycrew.tensor_transport._columns.kinds.casting import cast_array, cast_tensor
from raycrew.tensor_transport._columns.kinds.padding import Number, PadSide, join
from raycrew.tensor_transport._rows import Rows
from raycrew.tensor_transport.errors import BatchSchemaError, DecodeError
from raycrew.tensor_transport.protocols import Bytes, RowHandle

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Padding:
    """How rows of different shapes are joined; `value=None` forbids it."""

    value: Number | None = 0
    side: PadSide = "right"


class Kind(ABC):
    """What can be done with one kind of column. Rows lie along the first dimension."""

    name: ClassVar[str]
    gathers_into_new_memory: ClassVar[bool] = True
    """Whether joining columns and taking rows by number copy what the column refers to."""

    @abstractmethod
    def size(self, column: Any) -> int:
        """Number of rows."""

    @abstractmethod
    def take(self, column: Any, rows: Rows) -> Any:
        """Some rows: a view for a slice, else a copy."""

    @abstractmethod
    def concat(self, columns: Sequence[Any], key: str, padding: Padding) -> Any:
        """The rows of several columns, one after another."""

    def repeat(self, column: Any, times: int, *, share: bool) -> Any:
        """Each row `times` times in a row; rows that are objects of their own may share them."""
        return self.take(column, np.repeat(np.arange(self.size(column)), times))

    def part_rows(self, column: Any, repeats: npt.NDArray[np.int64]) -> Any:
        """The column with deep copies in these rows, where rows are objects that others may share.

        It may be changed in place: `take` gave it for rows by number.
        """
        return column

    def to(self, column: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
        """The column on a device, where the kind can be on one."""
        return column

    def cast(self, column: Any, dtype: torch.dtype, key: str, *, lossy: bool = False) -> Any:
        """The column in another dtype, where the kind has one.

        Raises:
            BatchSchemaError: It has none, or the dtype does not hold a value.
        """
        raise BatchSchemaError(f"column {key!r} is a {self.name}, which has no dtype to cast", key=key)

    def truncate(self, column: Any, dim: int, length: int, side: PadSide = "right") -> Any:
        """At most `length` elements along a dimension after the first, less those on one side; a view."""
        return column

    def writable(self, column: Any) -> Any:
        """A copy that may be written to, or the column itself if it may be."""
        return column

    def disassemble(self, column: Any, key: str) -> tuple[list[Any], list[Bytes]] | None:
        """The column as JSON and runs of bytes; None if it can only be pickled."""
        return None

    def assemble(self, params: Any, runs: Sequence[Bytes]) -> Any:
        """The counterpart of `disassemble`, in the memory of the runs.

        Raises:
            DecodeError: The parameters and the runs do not fit each other.
        """
        raise DecodeError(f"a column of kind {self.name!r} has no plain bytes")

    def own(self, column: Any) -> Any:
        """A copy in memory of its own."""
        return copy.deepcopy(column)


class TensorKind(Kind):
    """A tensor with at least one dimension."""

    name = "tensor"

    def size(self, column: torch.Tensor) -> int:
        return column.shape[0]

    def take(self, column: torch.Tensor, rows: Rows) -> torch.Tensor:
        return column[rows] if isinstance(rows, slice) else column[torch.from_numpy(rows).to(column.device)]

    def concat(self, columns: Sequence[torch.Tensor], key: str, padding: Padding) -> torch.Tensor:
        return join(columns, key, padding.value, padding.side)

    def to(self, column: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        return column.to(device, non_blocking=non_blocking)

    def cast(
        self, column: torch.Tensor, dtype: torch.dtype, key: str, *, lossy: bool = False
    ) -> torch.Tensor:
        return cast_tensor(column, dtype, key, lossy=lossy)

    def truncate(self, column: torch.Tensor, dim: int, length: int, side: PadSide = "right") -> torch.Tensor:
        return column[_kept(column.shape, dim, length, side)]

    def disassemble(self, column: torch.Tensor, key: str) -> tuple[list[Any], list[Bytes]]:
        return describe_tensor(column), [tensor_bytes(column, f"column {key!r}")]

    def assemble(self, params: Any, runs: Sequence[Bytes]) -> torch.Tensor:
        tensor = assemble_tensor(params, _one(runs))
        if tensor.ndim == 0:
            raise DecodeError("a column has at least one dimension")
        return tensor

    def own(self, column: torch.Tensor) -> torch.Tensor:
        return private_copy(column)


class ArrayKind(Kind):
    """A numpy array of numbers, strings or objects."""

    name = "array"

    def size(self, column: Array) -> int:
        return len(column)

    def take(self, column: Array, rows: Rows) -> Array:
        return column[rows]

    def concat(self, columns: Sequence[Array], key: str, padding: Padding) -> Array:
        first = columns[0]
        for other in columns[1:]:
            same = other.dtype == first.dtype or other.dtype.kind == first.dtype.kind in "US"
            if not same or other.shape[1:] != first.shape[1:]:
                raise BatchSchemaError(
                    f"column {key!r}: an array of {other.dtype} and row shape {other.shape[1:]} does not "
                    f"join {first.dtype} and {first.shape[1:]}; nothing is converted or padded silently",
                    key=key,
                    expected=(first.dtype, first.shape[1:]),
                    actual=(other.dtype, other.shape[1:]),
                )
        # numpy would turn foreign byte orders into the native one; texts take the widest.
        dtype = first.dtype
        if dtype.kind in "US":
            widest = max((column.dtype for column in columns), key=lambda text: text.itemsize)
            dtype = widest.newbyteorder(dtype.byteorder)
        return np.concatenate(list(columns), dtype=dtype)

    def repeat(self, column: Array, times: int, *, share: bool) -> Array:
        repeated = np.repeat(column, times, axis=0)
        return repeated if share else self.part_rows(repeated, np.arange(len(repeated)))

    def part_rows(self, column: Array, repeats: npt.NDArray[np.int64]) -> Array:
        if column.dtype.hasobject:
            for row in repeats.tolist():
                for place in np.ndindex(column.shape[1:]):
                    column[(row, *place)] = copy.deepcopy(column[(row, *place)])
        return column

    def cast(self, column: Array, dtype: torch.dtype, key: str, *, lossy: bool = False) -> Any:
        return cast_array(column, dtype, key, lossy=lossy)

    def truncate(self, column: Array, dim: int, length: int, side: PadSide = "right") -> Array:
        return column[_kept(column.shape, dim, length, side)]

    def writable(self, column: Array) -> Array:
        return column if column.flags.writeable else column.copy()

    def disassemble(self, column: Array, key: str) -> tuple[list[Any], list[Bytes]] | None:
        if type(column) is not np.ndarray or not has_plain_bytes(column):
            return None
        return [column.dtype.str, list(column.shape)], [array_bytes(column)]

    def assemble(self, params: Any, runs: Sequence[Bytes]) -> Array:
        name, shape = _pair(params)
        dtype, run = parse_numpy_dtype(name), _one(runs)
        check_size(run, dtype.itemsize, shape)
        if not shape:
            raise DecodeError("a column has at least one dimension")
        return array_over(run, dtype, shape)


class ListKind(Kind):
    """A list of any objects."""

    name = "list"
    gathers_into_new_memory = False

    def size(self, column: list[Any]) -> int:
        return len(column)

    def take(self, column: list[Any], rows: Rows) -> list[Any]:
        return column[rows] if isinstance(rows, slice) else [column[i] for i in rows.tolist()]

    def concat(self, columns: Sequence[list[Any]], key: str, padding: Padding) -> list[Any]:
        return [item for column in columns for item in column]

    def repeat(self, column: list[Any], times: int, *, share: bool) -> list[Any]:
        # Copies: a rollout appends to each sample's messages, and samples of one prompt must not share them.
        return [item if share else copy.deepcopy(item) for item in column for _ in range(times)]

    def part_rows(self, column: list[Any], repeats: npt.NDArray[np.int64]) -> list[Any]:
        for row in repeats.tolist():
            column[row] = copy.deepcopy(column[row])
        return column


class HandleKind(Kind):
    """A handle on rows that are somewhere else: every operation rewrites the handle alone."""

    name = "handle"
    gathers_into_new_memory = False

    def size(self, column: RowHandle) -> int:
        return len(column)

    def take(self, column: RowHandle, rows: Rows) -> RowHandle:
        return column.take_rows(rows)

    def concat(self, columns: Sequence[RowHandle], key: str, padding: Padding) -> RowHandle:
        try:
            return columns[0].join_rows(columns[1:])
        except ValueError as error:
            raise BatchSchemaError(f"column {key!r}: {error}", key=key) from error

    def cast(self, column: RowHandle, dtype: torch.dtype, key: str, *, lossy: bool = False) -> Any:
        raise BatchSchemaError(f"column {key!r} is a handle: localize() it before it is cast", key=key)

    def truncate(self, column: RowHandle, dim: int, length: int, side: PadSide = "right") -> RowHandle:
        if side == "left" and getattr(column, "ndim", 0) > dim:
            raise ValueError("a handle can't be truncated on the left: localize() it first")
        if dim == 1:
            return column.truncate_columns(length)
        if getattr(column, "ndim", 0) <= dim:
            return column
        raise ValueError(f"a handle can't be truncated along dimension {dim}: localize() it first")

    def own(self, column: RowHandle) -> RowHandle:
        return column


def describe_tensor(tensor: torch.Tensor) -> list[Any]:
    """Dtype and shape, as JSON."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def assemble_tensor(params: Any, run: Bytes) -> torch.Tensor:
    """A tensor over the bytes of `run`, checked."""
    name, shape = _pair(params)
    if not isinstance(name, str):
        raise DecodeError(f"unknown torch dtype {name!r}")
    dtype = parse_torch_dtype(name)
    check_size(run, dtype.itemsize, shape)
    return tensor_over(run, dtype, shape)


def _kept(shape: Sequence[int], dim: int, length: int, side: PadSide) -> tuple[slice, ...]:
    """What is left of a tensor of this shape, truncated along a dimension if it has that."""
    if len(shape) <= dim or shape[dim] <= length:
        return ()
    first = shape[dim] - length if side == "left" else 0
    return *[slice(None)] * dim, slice(first, first + length)


def _one(runs: Sequence[Bytes]) -> Bytes:
    if len(runs) != 1:
        raise DecodeError(f"expected one run of bytes, got {len(runs)}")
    return runs[0]


def _pair(params: Any) -> tuple[Any, list[int]]:
    match params:
        case [dtype, list() as shape]:
            return dtype, shape
    raise DecodeError(f"expected [dtype, shape], got {params!r}")
