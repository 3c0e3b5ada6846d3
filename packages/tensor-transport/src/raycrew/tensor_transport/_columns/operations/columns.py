"""What changes the columns of a batch: chosen, renamed, merged, cast, moved to a device, truncated."""

from collections.abc import Iterable, Mapping
from typing import Any, Self, overload

import torch

from raycrew.tensor_transport._columns.equality import equal_columns
from raycrew.tensor_transport._columns.joining import MetadataRules
from raycrew.tensor_transport._columns.kinds import (
    PadSide,
    Received,
    bare,
    check_pad_side,
    is_column,
    kind_of,
    row_count,
    transform,
)
from raycrew.tensor_transport._columns.naming import listed_columns
from raycrew.tensor_transport._columns.table import ColumnTable
from raycrew.tensor_transport.errors import BatchSchemaError

_UNSET: Any = object()


class ColumnOperations(ColumnTable):
    """A table whose columns can be chosen, renamed, merged, cast, moved and truncated."""

    def select(self, keys: Iterable[str]) -> Self:
        """A batch of some columns, in the order of `keys`; they are not copied.

        Raises:
            KeyError: A column is not there.
        """
        return self._same_rows({key: self._columns[key] for key in listed_columns(keys, self._columns)})

    @overload
    def pop(self, key: str, /) -> Any: ...

    @overload
    def pop(self, key: str, /, default: Any) -> Any: ...

    @overload
    def pop(self, key: Iterable[str], /) -> Self: ...

    def pop(self, key: str | Iterable[str], /, default: Any = _UNSET) -> Any:
        """Take a column out, as of any mapping; or several, which come as a batch: all of them, or none.

        Raises:
            KeyError: A column is not there.
        """
        if isinstance(key, str):
            return super().pop(key) if default is _UNSET else super().pop(key, default)
        if default is not _UNSET:
            raise TypeError("a default is for one column: several come as a batch, or not at all")
        taken = self.select(key)
        for name in taken:
            del self[name]
        return taken

    def rename(self, names: Mapping[str, str]) -> Self:
        """A batch of the same columns, those in `names` under their new names; nothing is copied.

        Args:
            names: The new name for each old one; they may be exchanged with each other.

        Raises:
            KeyError: A column is not there.
            ValueError: Two columns would have one name.
            TypeError: A name is no string.
        """
        listed_columns(names, self._columns)
        renamed: dict[str, Any] = {}
        for old, column in self._columns.items():
            new = names.get(old, old)
            if not isinstance(new, str):
                raise TypeError(f"columns are named by strings, and {old!r} would be named {new!r}")
            if new in renamed:
                raise ValueError(f"two columns would be named {new!r}; one of them was {old!r}")
            renamed[new] = column
        return self._same_rows(renamed)

    def union(self, other: Mapping[str, Any], *, metadata: MetadataRules | None = None) -> Self:
        """The columns of this batch and of another one of the same rows; nothing is copied.

        Args:
            other: A batch, or a mapping of columns. A column that both have must be equal in both, and so
                must a plan of microbatches.
            metadata: As for `concat`; attributes of a subclass or of users count as metadata.

        Raises:
            BatchSchemaError: A column differs, there are other rows, or metadata, attributes or plans differ.
        """
        theirs = other if isinstance(other, ColumnTable) else ColumnTable(other)
        merged = dict(self._columns)
        for key, column in vars(theirs)["_columns"].items():
            if key in merged and not equal_columns(key, bare(merged[key]), bare(column)):
                raise BatchSchemaError(
                    f"column {key!r} differs between the two batches: rename() or pop() one of them",
                    key=key,
                    expected=_described(merged[key]),
                    actual=_described(column),
                )
            if self._columns and row_count(column) != self.size:
                raise BatchSchemaError(
                    f"column {key!r} has {row_count(column)} rows, the batch has {self.size}",
                    key=key,
                    expected=self.size,
                    actual=row_count(column),
                )
            merged.setdefault(key, column)
        both = self._like(type(self), merged)
        vars(both).update(self._joined_attributes([self, theirs], metadata, same_rows=True))
        both.metadata = self._joined_metadata([self, theirs], metadata)
        return both

    def cast(self, dtypes: Mapping[str, torch.dtype], *, lossy: bool = False) -> Self:
        """A batch with some columns in other dtypes; the other columns are not copied.

        Fractions are rounded to what a floating-point dtype has. Everything else has to be held exactly:
        integers and truth values by any dtype, and what becomes an integer or a truth value.

        Args:
            dtypes: The dtype for each of these columns, which are tensors, arrays of numbers, ragged or
                packed; a handle has to be localised first.
            lossy: Cast whatever comes of it, as `tensor.to(dtype)` does.

        Raises:
            KeyError: A column is not there.
            BatchSchemaError: A column has no dtype, or the new one does not hold a value.
        """
        listed_columns(dtypes, self._columns)

        def cast(key: str, column: Any) -> Any:
            return transform(column, lambda kind, value: kind.cast(value, dtypes[key], key, lossy=lossy))

        return self._same_rows(
            {key: cast(key, column) if key in dtypes else column for key, column in self._columns.items()}
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

    def truncate_tensors(
        self,
        dim: int,
        truncated_len: int,
        keys: Iterable[str] | None = None,
        *,
        pad_side: PadSide = "right",
    ) -> Self:
        """Keep the first `truncated_len` elements along `dim` of every tensor or array that has it, in place.

        Args:
            dim: A dimension after the first.
            truncated_len: How many to keep; shorter ones stay as they are.
            keys: Only these columns.
            pad_side: What is cut: `left` keeps the last elements, of columns that are padded on the left.

        Raises:
            ValueError: `dim` is the batch dimension, the length is negative, a side is unknown, or a handle
                would be cut on the left.
            KeyError: A column of `keys` is not there.
        """
        check_pad_side(pad_side)
        if dim < 1 or truncated_len < 0:
            raise ValueError(
                f"can't truncate dimension {dim} to {truncated_len}: rows are dimension 0; use slice()"
            )
        chosen = set(self if keys is None else listed_columns(keys, self._columns))
        self._columns = {
            key: transform(column, lambda k, c: k.truncate(c, dim, truncated_len, pad_side))
            if key in chosen
            else column
            for key, column in self._columns.items()
        }
        return self

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, metadata_keys: Iterable[str] = ()) -> Self:
        """A batch of whatever a plain dict holds: what can be a column is one, the rest is metadata.

        Columns are tensors and arrays with a dimension, lists, tuples, ragged and packed tensors, handles.
        Texts, numbers, mappings, None and tensors without dimensions are metadata. What a value is depends on
        its type alone, never on whether its length happens to fit.

        Args:
            data: Columns and metadata by name; a batch's own metadata is kept.
            metadata_keys: What is metadata though it could be a column, as a list of stop words.

        Raises:
            KeyError: A key of `metadata_keys` is not there.
            BatchSchemaError: A column has another number of rows than the others; the error names it.
        """
        kept = set(listed_columns(metadata_keys, data))
        columns = {key: value for key, value in data.items() if key not in kept and _has_rows(value)}
        metadata = dict(data.metadata) if isinstance(data, ColumnTable) else {}
        metadata.update((key, value) for key, value in data.items() if key not in columns)
        table = ColumnTable(columns, metadata=metadata)
        return table._like(cls, vars(table)["_columns"])  # noqa: SLF001 - a table of this class


def _described(column: Any) -> str:
    value = bare(column)
    shape = f" of {value.dtype}, shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return f"a {kind_of(value).name}{shape}"


def _has_rows(value: Any) -> bool:
    """Whether a value is meant to be a column; one that can't be, as a masked array, is refused as such."""
    return isinstance(value, tuple) or is_column(value)
