"""A mapping of checked columns: lookups, copies, memory and pickling."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import FunctionType
from typing import Any, ClassVar, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from raycrew.tensor_transport._bytes import Encoded, finish
from raycrew.tensor_transport._columns.encoding import decode_columns, encode_columns
from raycrew.tensor_transport._columns.equality import equal_columns
from raycrew.tensor_transport._columns.joining import MetadataRules, join_metadata, rules_for
from raycrew.tensor_transport._columns.kinds import (
    Received,
    accept_column,
    bare,
    kind_of,
    row_count,
    transform,
)
from raycrew.tensor_transport._columns.naming import name_columns
from raycrew.tensor_transport._rows import RowIndex, Rows, normalize_rows, padding_within, repeats
from raycrew.tensor_transport.errors import BatchSchemaError
from raycrew.tensor_transport.protocols import Bytes


class ColumnTable(MutableMapping[str, Any]):
    """Columns with one entry per row, and metadata; what `BatchedDataDict` is built on."""

    _of_these_rows: ClassVar[tuple[str, ...]] = ()
    """Attributes that say something of these very rows: other rows don't get them."""
    padding_rows: int | None = None
    metadata_rules: ClassVar[MetadataRules] = "same"
    """What becomes of metadata where batches are joined and no rule is named; a subclass may have its own."""

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

    @overload
    def __getitem__(self, key: str, /) -> Any: ...

    @overload
    def __getitem__(self, key: RowIndex, /) -> Self: ...

    def __getitem__(self, key: str | RowIndex, /) -> Any:
        """A column by its name, or some rows as `select_indices` takes them: `batch[2:5]`, `batch[mask]`."""
        if not isinstance(key, str):
            return self._take(type(self), normalize_rows(key, self.size))
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
        if key in self._columns and rows != self.size:
            self._forget_rows()
        self._columns[key] = column

    def __delitem__(self, key: str) -> None:
        del self._columns[key]
        if not self._columns:
            self._forget_rows()

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
            equal_columns(key, bare(column), bare(theirs[key])) for key, column in self._columns.items()
        )

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Self:
        return self._same_rows(self._columns)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update({k: copy.deepcopy(v, memo) for k, v in all_attributes(self).items()})
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
        attributes = all_attributes(self)
        if not self.metadata:
            del attributes["metadata"]
        return encode_columns(self._columns, self.size, attributes)

    @classmethod
    def _joined_metadata(cls, tables: "Sequence[ColumnTable]", rules: MetadataRules | None) -> dict[str, Any]:
        parts = [table.metadata for table in tables]
        rules = rules_for(parts, cls.metadata_rules) if rules is None else rules
        return join_metadata(parts, rules, [table.size for table in tables])

    @classmethod
    def _joined_attributes(
        cls, tables: "Sequence[ColumnTable]", rules: MetadataRules | None, *, same_rows: bool = False
    ) -> dict[str, Any]:
        """What users added to each: as metadata, with the rules that make sense for any object."""
        rules = cls.metadata_rules if rules is None else rules
        parts = [
            own_attributes(table) | (table._about_rows() if same_rows else {})  # noqa: SLF001 - of this class
            for table in tables
        ]
        return join_metadata(parts, "first" if rules == "first" else "same")

    def _forget_rows(self) -> None:
        """Drop what is said of rows that are no longer these."""
        for name in self._of_these_rows:
            vars(self).pop(name, None)

    def _about_rows(self) -> dict[str, Any]:
        """What is said of these very rows."""
        return {k: v for k, v in vars(self).items() if k in self._of_these_rows and v is not None}

    def _take(self, cls: "type[TableT]", rows: Rows) -> "TableT":
        part = self._like(cls, take_columns(self._columns, rows, self.size))
        if self.padding_rows is not None and isinstance(rows, slice):
            part.padding_rows = padding_within(rows, self.size, self.padding_rows)
        return part

    def _map(self, change: Callable[[Any], Any]) -> Self:
        return self._like(type(self), {key: change(column) for key, column in self._columns.items()})

    def _same_rows(self, columns: Mapping[str, Any]) -> Self:
        """A batch of other columns of the very same rows: what is said of these rows holds for it, too."""
        twin = self._like(type(self), columns)
        if twin.size == self.size:
            vars(twin).update(self._about_rows())
        return twin

    def _like(self, cls: "type[TableT]", columns: Mapping[str, Any]) -> "TableT":
        """A batch of other columns with the same metadata and attributes, made without its `__init__`."""
        batch = cls.__new__(cls)
        vars(batch).update(own_attributes(self), metadata=dict(self.metadata), _columns=dict(columns))
        return batch


TableT = TypeVar("TableT", bound=ColumnTable)


def take_columns(columns: Mapping[str, Any], rows: Rows, size: int) -> dict[str, Any]:
    """Some rows of all columns: views for a slice, else copies; rows named again are deep copies.

    Raises:
        BatchSchemaError: An object in a row that is named again can't be copied.
    """
    again = repeats(rows, size)
    taken = {key: _take_rows(column, rows) for key, column in columns.items()}
    return {key: _parted(key, column, again) for key, column in taken.items()} if len(again) else taken


def _take_rows(column: Any, rows: Rows) -> Any:
    return transform(column, lambda kind, value: kind.take(value, rows), copies=not isinstance(rows, slice))


def _parted(key: str, column: Any, again: npt.NDArray[np.int64]) -> Any:
    if isinstance(column, Received):  # Each row becomes a copy of its own when it is looked up.
        return column
    try:
        return kind_of(column).part_rows(column, again)
    except Exception as error:
        raise BatchSchemaError(
            f"column {key!r} can't have a row twice, as copying it fails ({error}); pop() the column first, "
            "or take repeat_interleave(n, share=[...])",
            key=key,
        ) from error


def own_attributes(table: ColumnTable) -> dict[str, Any]:
    """What a subclass or a user added: it belongs to the batch as metadata does."""
    others = ("metadata", *table._of_these_rows)  # noqa: SLF001 - a part of the class
    return {name: value for name, value in all_attributes(table).items() if name not in others}


def all_attributes(table: ColumnTable) -> dict[str, Any]:
    """Everything but columns and what properties cache, which is computed anew from the columns."""
    return {
        name: value
        for name, value in vars(table).items()
        if name != "_columns"
        and not _is_cached(type(table), name)
        and (value is not None or name not in table._of_these_rows)  # noqa: SLF001 - a part of the class
    }


def _is_cached(cls: type, name: str) -> bool:
    """Whether an attribute of the class, as `functools.cached_property`, put it there."""
    found = inspect.getattr_static(cls, name, None)
    is_method = isinstance(found, FunctionType | classmethod | staticmethod)
    return hasattr(found, "__get__") and not hasattr(found, "__set__") and not is_method


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
