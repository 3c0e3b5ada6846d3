"""A mapping of checked columns: lookups, copies, memory and pickling."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

import torch

from raycrew.tensor_transport._bytes import Encoded, finish
from raycrew.tensor_transport._columns.equality import equal
from raycrew.tensor_transport._columns.frame import decode_columns, encode_columns
from raycrew.tensor_transport._columns.joining import join_columns
from raycrew.tensor_transport._columns.metadata import MetadataRules, join_metadata
from raycrew.tensor_transport._columns.naming import name_columns
from raycrew.tensor_transport._kinds import (
    Padding,
    Received,
    accept_column,
    bare,
    kind_of,
    row_count,
    transform,
)
from raycrew.tensor_transport._rows import (
    RowIndex,
    Rows,
    check_permutation,
    inverse_permutation,
    normalize_rows,
)
from raycrew.tensor_transport.errors import BatchSchemaError
from raycrew.tensor_transport.protocols import Bytes


class ColumnTable(MutableMapping[str, Any]):
    """Columns with one entry per row, and metadata; what `BatchedDataDict` is built on."""

    _of_these_rows: ClassVar[tuple[str, ...]] = ()
    """Attributes that say something of these very rows: other rows don't get them."""

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
        if isinstance(data, ColumnTable):
            self.metadata = {**data.metadata, **self.metadata}
        self.update(data, **columns)

    def __getitem__(self, key: str) -> Any:
        column = self._columns[key]
        if isinstance(column, Received):
            column = self._columns[key] = kind_of(column).own(column.value)
        return column

    def __setitem__(self, key: str, column: Any) -> None:
        column = accept_column(key, column)
        rows = row_count(column)
        others = self._columns.keys() - {key}
        if others and rows != self.size:
            known = name_columns(others)
            raise BatchSchemaError(
                f"column {key!r} has {rows} rows, the batch has {self.size} (columns {known}); "
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

    def __eq__(self, other: object) -> bool:
        """Whether both have the same columns: kinds, dtypes, shapes and values. Metadata is not compared."""
        if not isinstance(other, Mapping):
            return NotImplemented
        theirs = other._columns if isinstance(other, ColumnTable) else other
        return self._columns.keys() == theirs.keys() and all(
            equal(bare(column), bare(theirs[key])) for key, column in self._columns.items()
        )

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Self:
        twin = self._like(type(self), self._columns)
        vars(twin).update({k: v for k, v in vars(self).items() if k in self._of_these_rows})
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
        `shard_by_batch_size`, which returns these indices. So it undoes a permutation, where
        `RTensor.reorder` applies one.

        A plan of microbatches is dropped: it was one for the rows in the order they had.

        Raises:
            ValueError: The indices are no permutation of the rows.
            IndexError: A row does not exist.
        """
        rows = inverse_permutation(check_permutation(reordered_indices, self.size))
        self._columns = {key: take_rows(column, rows) for key, column in self._columns.items()}
        for name in self._of_these_rows:
            vars(self).pop(name, None)
        return self

    def repeat_interleave(self, num_repeats: int, *, share: bool = False) -> Self:
        """Each row `num_repeats` times in a row.

        Args:
            num_repeats: How often.
            share: Let the repeats of a row share its objects in lists and arrays of objects, and its tensor
                in a `PackedTensor`. By default rows share nothing, with each other nor with this batch: these
                are deep copies. (Rows of tensors and of other arrays are copies in any case.)

        Raises:
            ValueError: `num_repeats` is negative.
        """
        if num_repeats < 0:
            raise ValueError(f"rows can't be repeated {num_repeats} times")
        return self._map(
            lambda column: transform(column, lambda k, c: k.repeat(c, num_repeats, share=share), copies=True)
        )

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
            KeyError: A column of `keys` is not there.
        """
        if dim < 1 or truncated_len < 0:
            raise ValueError(
                f"can't truncate dimension {dim} to {truncated_len}: rows are dimension 0; use slice()"
            )
        chosen = set(self) if keys is None else set(keys)
        if unknown := chosen - set(self):
            raise KeyError(f"there are no columns {name_columns(unknown)}; there are {name_columns(self)}")
        self._columns = {
            key: transform(column, lambda k, c: k.truncate(c, dim, truncated_len))
            if key in chosen
            else column
            for key, column in self._columns.items()
        }
        return self

    def writable(self) -> Self:
        """The batch with every column in memory of its own that may be written to; what already is, stays."""
        twin = copy.copy(self)
        vars(twin)["_columns"] = {key: _writable(column) for key, column in self._columns.items()}
        return twin

    def borrow(self, key: str) -> Any:
        """A column where it lies, never copied: for reading only.

        After a `ray.get` that is memory which other processes read as well, and writing through the tensor
        would change what they see. Look the column up (`batch[key]`) for one that may be written to.
        """
        column = self._columns[key]
        return bare(column)

    def encode(self, *, borrow: bool = False) -> Encoded:
        """The batch as a header and few buffers.

        Args:
            borrow: Leave large tensors in the memory they have: taking the buffers, or
                `Encoded.check_unchanged`, raises if somebody wrote to them since. By default every byte is
                copied: a snapshot.

        Raises:
            UnsupportedTensorError: A tensor has no plain bytes, or can't be watched for writes (`borrow`).
        """
        return finish(self._lay_out, borrow=borrow)

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
        batch = cls.__new__(cls)
        vars(batch).update({"metadata": {}} | attributes | {"_columns": columns})
        return batch

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        header, buffers = self._lay_out()
        return _decode, (type(self), header, *buffers)

    def _lay_out(self) -> tuple[bytes, list[Bytes]]:
        attributes = {k: v for k, v in vars(self).items() if k != "_columns"}
        if not self.metadata:
            del attributes["metadata"]
        for name in self._of_these_rows:
            if attributes.get(name, ...) is None:
                del attributes[name]
        return encode_columns(self._columns, self.size, attributes)

    @classmethod
    def _join(
        cls,
        parts: Sequence[Mapping[str, Any]],
        padding: Callable[[str], Padding],
        metadata: MetadataRules = "same",
    ) -> Self:
        for i, part in enumerate(parts):
            if not isinstance(part, Mapping):
                raise TypeError(f"batches are joined, and part {i} is a {type(part).__name__}")
        tables = [part if isinstance(part, ColumnTable) else ColumnTable(part) for part in parts]
        joined = cls.__new__(cls)
        own = [_own_attributes(table) for table in tables]
        vars(joined).update(
            join_metadata(own, metadata if isinstance(metadata, str) else "same"),
            metadata=join_metadata([table.metadata for table in tables], metadata),
            _columns=join_columns([vars(table)["_columns"] for table in tables], padding),
        )
        return joined

    def _take(self, cls: "type[TableT]", rows: Rows) -> "TableT":
        return self._like(cls, {key: take_rows(column, rows) for key, column in self._columns.items()})

    def _map(self, change: Callable[[Any], Any]) -> Self:
        return self._like(type(self), {key: change(column) for key, column in self._columns.items()})

    def _like(self, cls: "type[TableT]", columns: Mapping[str, Any]) -> "TableT":
        """A batch of other columns with the same metadata and attributes, made without its `__init__`."""
        batch = cls.__new__(cls)
        vars(batch).update(_own_attributes(self), metadata=dict(self.metadata), _columns=dict(columns))
        return batch


TableT = TypeVar("TableT", bound=ColumnTable)


def take_rows(column: Any, rows: Rows) -> Any:
    """Some rows of any column: views for a slice, else copies."""
    return transform(column, lambda kind, value: kind.take(value, rows), copies=not isinstance(rows, slice))


def _own_attributes(table: ColumnTable) -> dict[str, Any]:
    """What a subclass or a user added: it belongs to the batch as metadata does."""
    others = ("_columns", "metadata", *table._of_these_rows)  # noqa: SLF001 - a part of the class
    return {name: value for name, value in vars(table).items() if name not in others}


def _writable(column: Any) -> Any:
    kind = kind_of(column)
    return kind.own(column.value) if isinstance(column, Received) else kind.writable(column)


def _decode(cls: type[ColumnTable], header: bytes, *buffers: Bytes) -> ColumnTable:
    return cls.decode(header, buffers, allow_pickle=True)


def _size_bytes(column: Any) -> int:
    value = bare(column)
    return int(getattr(value, "nbytes", 0))


def _summary(column: Any) -> str:
    value = bare(column)
    if hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
