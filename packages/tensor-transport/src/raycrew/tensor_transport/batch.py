"""`BatchedDataDict`: columns with one batch dimension, moved without needless copies."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch

from raycrew.tensor_transport._codec import Encoded
from raycrew.tensor_transport._columns import Received, bare, kind_of, row_count, transform
from raycrew.tensor_transport._frame import decode_columns, encode_columns
from raycrew.tensor_transport._indexing import (
    RowIndex,
    check_permutation,
    even_bounds,
    inverse_permutation,
    normalize_rows,
)
from raycrew.tensor_transport._kinds import Padding
from raycrew.tensor_transport._padding import Number, PadSide, check_pad_side
from raycrew.tensor_transport.errors import BatchSchemaError
from raycrew.tensor_transport.protocols import Bytes

DictT = TypeVar("DictT", bound=Mapping[str, Any])


class BatchedDataDict(MutableMapping[str, Any], Generic[DictT]):
    """A mapping of columns whose first dimension is the batch.

    A column is a tensor, a `RaggedTensor`, a `PackedTensor`, a numpy array or a list. What does not have one
    entry per row belongs into `metadata`, which every operation keeps.

    Pickled (as an argument or result of an actor call, or by `ray.put`), large columns travel as out-of-band
    buffers in the memory they have, and small ones together in few aligned buffers. A column that arrives in
    memory which others read too is copied when it is first looked up; slices that are never looked up, and
    columns that are not used, cost nothing. numpy columns stay in place and are read-only; see `writable`.

    Args:
        data: Columns to start with.
        metadata: Anything else that belongs to the batch.
        **columns: More columns.

    Attributes:
        metadata: Kept by slicing, selecting, sharding and pickling; shared, not copied.
        micro_batch_indices: For each global batch, the [start, end) of its microbatches; set by
            `shard_by_batch_size` for dynamic batching and sequence packing.
        micro_batch_lengths: The sequence length (tokens, for packing) of each of those microbatches.
        elem_counts_per_gb: Rows in each global batch; set for sequence packing, where they differ.

    Raises:
        BatchSchemaError: A column has another number of rows than the batch.
    """

    def __init__(
        self,
        data: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        /,
        *,
        metadata: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> None:
        self._columns: dict[str, Any] = {}
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.micro_batch_indices: list[list[list[int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None
        if isinstance(data, BatchedDataDict):
            self.metadata = {**data.metadata, **self.metadata}
        self.update(data, **columns)

    # A mapping

    def __getitem__(self, key: str) -> Any:
        column = self._columns[key]
        if isinstance(column, Received):
            column = self._columns[key] = kind_of(column).own(column.value)
        return column

    def __setitem__(self, key: str, column: Any) -> None:
        column = _checked(key, column)
        rows = row_count(column)
        others = self._columns.keys() - {key}
        if others and rows != self.size:
            raise BatchSchemaError(
                f"column {key!r} has {rows} rows, the batch has {self.size} (columns {_names(others)}); "
                "what is not one entry per row belongs into .metadata",
                key=key,
                expected=self.size,
                actual=rows,
            )
        self._columns[key] = column

    def __delitem__(self, key: str) -> None:
        del self._columns[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Number of columns, as of any mapping; `size` is the number of rows."""
        return len(self._columns)

    def __contains__(self, key: object) -> bool:
        return key in self._columns

    def __repr__(self) -> str:
        columns = ", ".join(f"{key}: {_summary(column)}" for key, column in self._columns.items())
        return f"{type(self).__name__}(size={self.size}, {{{columns}}})"

    def __copy__(self) -> Self:
        twin = self._like(type(self), self._columns)
        vars(twin).update({k: v for k, v in vars(self).items() if k not in ("_columns", "metadata")})
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update({k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k != "_columns"})
        vars(twin)["_columns"] = {k: copy.deepcopy(self[k], memo) for k in self}
        return twin

    def copy(self) -> Self:
        """A batch of the same columns, not copied; adding a column to one does not add it to the other."""
        return copy.copy(self)

    def get_dict(self) -> dict[str, Any]:
        """The columns as a plain dict."""
        return {key: self[key] for key in self}

    @property
    def size(self) -> int:
        """Number of rows; 0 without columns."""
        for column in self._columns.values():
            return row_count(column)
        return 0

    @property
    def size_bytes(self) -> int:
        """Bytes of tensors and arrays; lists of objects count nothing."""
        return sum(_size_bytes(column) for column in self._columns.values())

    # Rows

    def slice(self, start: int, end: int) -> "SlicedDataDict[DictT]":
        """The rows from `start` up to `end`, as views.

        Raises:
            IndexError: They are not all there.
        """
        if not 0 <= start <= end <= self.size:
            raise IndexError(f"rows {start}..{end} are not within the {self.size} rows of the batch")
        return self._take(SlicedDataDict, slice(start, end))

    def select_indices(self, indices: RowIndex) -> Self:
        """The rows that `indices` names, in that order.

        Args:
            indices: Integers (negative ones count from the end) or one boolean per row, as a list, tuple,
                tensor or array: copies. A slice or range: views.

        Raises:
            IndexError: A row does not exist, or a mask has another length than the batch.
        """
        return self._take(type(self), normalize_rows(indices, self.size))

    def reorder_data(self, reordered_indices: RowIndex) -> Self:
        """Move row `i` to position `reordered_indices[i]`, in place.

        It puts rows back in order that were taken by `select_indices(reordered_indices)`, or sharded by
        `shard_by_batch_size`, which returns these indices.

        Raises:
            ValueError: The indices are no permutation of the rows.
        """
        rows = inverse_permutation(check_permutation(reordered_indices, self.size))
        self._columns = {key: _take(column, rows) for key, column in self._columns.items()}
        return self

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Each row `num_repeats` times in a row; objects in lists are deep copies.

        Raises:
            ValueError: `num_repeats` is negative.
        """
        if num_repeats < 0:
            raise ValueError(f"rows can't be repeated {num_repeats} times")
        return self._map(lambda column: transform(column, lambda k, c: k.repeat(c, num_repeats), copies=True))

    def chunk(self, rank: int, chunks: int) -> "SlicedDataDict[DictT]":
        """The `rank`-th of `chunks` equal runs of rows, as views.

        Raises:
            ValueError: The rows do not divide evenly.
            IndexError: There is no such chunk.
        """
        if chunks < 1 or self.size % chunks:
            raise ValueError(
                f"{self.size} rows do not divide into {chunks} equal chunks; shard(n) takes uneven ones"
            )
        if not 0 <= rank < chunks:
            raise IndexError(f"there is no chunk {rank} of {chunks}")
        length = self.size // chunks
        return self.slice(rank * length, (rank + 1) * length)

    def shard(self, n: int) -> "list[SlicedDataDict[DictT]]":
        """`n` runs of rows whose sizes differ by at most one, as views; `concat` puts them together again."""
        return [self.slice(start, end) for start, end in even_bounds(self.size, n)]

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> "SlicedDataDict[DictT]":
        """The rows of one global batch, with its plan of microbatches.

        Args:
            batch_idx: Which global batch.
            batch_size: Rows in each; may be left out where `shard_by_batch_size` packed sequences.

        Raises:
            ValueError: `batch_size` is needed.
            IndexError: There is no such global batch.
        """
        if self.elem_counts_per_gb is not None:
            ends = np.cumsum([0, *self.elem_counts_per_gb]).tolist()
            if not 0 <= batch_idx < len(self.elem_counts_per_gb):
                raise IndexError(f"there is no global batch {batch_idx} of {len(self.elem_counts_per_gb)}")
            start, end = ends[batch_idx], ends[batch_idx + 1]
        elif batch_size is None:
            raise ValueError("batch_size is needed: the batch was not sharded by sequence packing")
        else:
            start, end = batch_idx * batch_size, (batch_idx + 1) * batch_size
        batch = self.slice(start, end)
        if self.micro_batch_indices is not None and self.micro_batch_lengths is not None:
            batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
        if self.elem_counts_per_gb is not None:
            batch.elem_counts_per_gb = [end - start]
        return batch

    # Several batches

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[str, Any]],
        pad_value_dict: Mapping[str, Number] | None = None,
        *,
        pad_side: PadSide | Mapping[str, PadSide] = "right",
    ) -> Self:
        """Join batches, one after another; rows of different lengths are padded to the longest.

        Args:
            batches: At least one, all with the same columns.
            pad_value_dict: What to pad a column with, where it is not 0.
            pad_side: Where to pad, for all columns or per column (the others on the right).

        Returns:
            The batch, with the metadata of all; where two disagree, the first one's.

        Raises:
            BatchSchemaError: Columns are missing, or dtypes differ.
        """
        values, sides = pad_value_dict or {}, pad_side if isinstance(pad_side, Mapping) else {}
        default: PadSide = "right" if isinstance(pad_side, Mapping) else pad_side
        for side in (default, *sides.values()):
            check_pad_side(side)
        return cls._join(batches, lambda key: Padding(values.get(key, 0), sides.get(key, default)))

    @classmethod
    def concat(cls, parts: Sequence[Mapping[str, Any]]) -> Self:
        """Join batches whose rows have equal shapes: what `shard` took apart. Nothing is padded.

        Raises:
            BatchSchemaError: Columns are missing, or dtypes or row shapes differ.
        """
        return cls._join(parts, lambda _: Padding(None))

    @classmethod
    def _join(cls, parts: Sequence[Mapping[str, Any]], padding: Callable[[str], Padding]) -> Self:
        if not parts:
            raise ValueError("nothing to join: at least one batch is needed")
        batches: list[BatchedDataDict[Any]] = [
            part if isinstance(part, BatchedDataDict) else BatchedDataDict(part) for part in parts
        ]
        keys = list(batches[0])
        for i, batch in enumerate(batches):
            if differ := set(keys) ^ set(batch):
                raise BatchSchemaError(
                    f"batch {i} has columns {_names(batch)}, the first one {_names(keys)}",
                    key=min(differ),
                    expected=sorted(keys),
                    actual=sorted(batch),
                )
        metadata = {key: value for batch in reversed(batches) for key, value in batch.metadata.items()}
        joined = cls(metadata=metadata)
        joined._columns = {key: _concat(batches, key, padding(key)) for key in keys}
        return joined

    # Memory

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> Self:
        """Move tensors to a device, in place; lists and numpy arrays stay."""
        target = torch.device(device)
        on_cpu = target.type == "cpu"
        self._columns = {
            key: transform(column, lambda k, c: k.to(c, target, non_blocking=non_blocking))
            if on_cpu or not isinstance(column, Received)
            else kind_of(column).to(column.value, target, non_blocking=non_blocking)
            for key, column in self._columns.items()
        }
        return self

    to_device = to

    def truncate_tensors(self, dim: int, truncated_len: int, keys: Iterable[str] | None = None) -> Self:
        """Keep the first `truncated_len` elements along `dim` of every tensor that has it, in place.

        Args:
            dim: A dimension after the first.
            truncated_len: How many to keep; shorter tensors stay as they are.
            keys: Only these columns.

        Raises:
            ValueError: `dim` is the batch dimension, or the length is negative.
        """
        if dim < 1 or truncated_len < 0:
            raise ValueError(
                f"can't truncate dimension {dim} to {truncated_len}: rows are dimension 0; use slice()"
            )
        chosen = set(self) if keys is None else set(keys)
        self._columns = {
            key: transform(column, lambda k, c: k.truncate(c, dim, truncated_len))
            if key in chosen
            else column
            for key, column in self._columns.items()
        }
        return self

    def writable(self) -> Self:
        """The batch with every column in memory of its own that may be written to; what already is, stays."""
        return self._map(
            lambda column: (
                kind_of(column).own(column.value)
                if isinstance(column, Received)
                else kind_of(column).writable(column)
            )
        )

    def borrow(self, key: str) -> Any:
        """A column where it lies, never copied: for reading only.

        After a `ray.get` that is memory which other processes read as well, and writing through the tensor
        would change what they see. Look the column up (`batch[key]`) for one that may be written to.
        """
        column = self._columns[key]
        return bare(column)

    def encode(self) -> Encoded:
        """The batch as a header and few buffers, large columns in the memory they have."""
        attributes = {k: v for k, v in vars(self).items() if k != "_columns" and v is not None}
        if not self.metadata:
            del attributes["metadata"]
        return encode_columns(self._columns, self.size, attributes)

    @classmethod
    def decode(cls, header: bytes, buffers: Sequence[Bytes], *, allow_pickle: bool = False) -> Self:
        """The counterpart of `encode`, in place.

        Args:
            header: The header.
            buffers: The buffers.
            allow_pickle: Whether lists, objects and metadata may be unpickled: only for trusted bytes.

        Raises:
            DecodeError: The header or the buffers are damaged, or hold pickled content that is not allowed.
        """
        columns, attributes = decode_columns(header, buffers, allow_pickle=allow_pickle)
        batch = cls()
        batch._columns = columns
        vars(batch).update(attributes)
        return batch

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        encoded = self.encode()
        return _decode, (type(self), encoded.header, *encoded.buffers)

    # Inner workings

    def _take(self, cls: "type[BatchT]", rows: Any) -> "BatchT":
        return self._like(cls, {key: _take(column, rows) for key, column in self._columns.items()})

    def _map(self, change: Callable[[Any], Any]) -> Self:
        return self._like(type(self), {key: change(column) for key, column in self._columns.items()})

    def _like(self, cls: "type[BatchT]", columns: Mapping[str, Any]) -> "BatchT":
        """A batch of other columns with the same metadata."""
        batch = cls(metadata=self.metadata)
        batch._columns = dict(columns)
        return batch


class SlicedDataDict(BatchedDataDict[DictT]):
    """A part of a larger batch: one rank's share, or a run of rows."""


BatchT = TypeVar("BatchT", bound=BatchedDataDict[Any])


def _decode(cls: type[BatchedDataDict[Any]], header: bytes, *buffers: Bytes) -> BatchedDataDict[Any]:
    return cls.decode(header, buffers, allow_pickle=True)


def _checked(key: str, column: Any) -> Any:
    """The column as it is kept, or an error that says why it is none."""
    if not isinstance(key, str):
        raise TypeError(f"columns are named by strings, not by {key!r}")
    if isinstance(column, tuple):
        column = list(column)
    dimensions = getattr(column, "ndim", 1)
    try:
        kind_of(column)
    except TypeError:
        dimensions = 0
    if isinstance(column, torch.Tensor) and (column.is_nested or column.layout != torch.strided):
        raise BatchSchemaError(
            f"column {key!r} is a nested or sparse tensor; "
            "use RaggedTensor.from_rows(tensor.unbind()) or to_dense()",
            key=key,
            actual=column.layout,
        )
    if dimensions == 0:
        raise BatchSchemaError(
            f"column {key!r} is a {type(column).__name__} without a batch dimension; a column is a tensor, "
            "array or list with one entry per row, anything else belongs into .metadata",
            key=key,
            actual=type(column).__name__,
        )
    return column


def _take(column: Any, rows: Any) -> Any:
    return transform(column, lambda kind, value: kind.take(value, rows), copies=not isinstance(rows, slice))


def _concat(batches: "Sequence[BatchedDataDict[Any]]", key: str, padding: Padding) -> Any:
    columns = [batch._columns[key] for batch in batches]  # noqa: SLF001 - what was received need not be copied
    kinds = {kind_of(column) for column in columns}
    if len(kinds) > 1:
        names = sorted(kind.name for kind in kinds)
        raise BatchSchemaError(f"column {key!r} is of several kinds: {names}", key=key, actual=names)
    kind = kinds.pop()
    received = any(isinstance(column, Received) for column in columns)
    values = [bare(column) for column in columns]
    joined = kind.concat(values, key, padding)
    return Received(joined) if received and not kind.gathers_into_new_memory else joined


def _size_bytes(column: Any) -> int:
    value = bare(column)
    return int(getattr(value, "nbytes", 0))


def _summary(column: Any) -> str:
    value = bare(column)
    if hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def _names(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
