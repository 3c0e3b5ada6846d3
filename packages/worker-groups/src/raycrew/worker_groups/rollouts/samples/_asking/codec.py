"""Columns of a user as rows of a queue, and back: values as bytes, handles as they are."""

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any, Literal

from ray import ObjectRef, cloudpickle

from raycrew.worker_groups.rollouts.samples._asking.arrays import MARK, decode_array, encode_array, is_plain
from raycrew.worker_groups.rollouts.samples._storage import Held, Row


def encode(columns: Mapping[str, Any]) -> tuple[dict[str, list[Row]], int]:
    """Columns as rows, and how many there are.

    Raises:
        TypeError: Something is no column, or has a row that can't be kept.
        ValueError: There is no column, or they differ in length.
    """
    if not isinstance(columns, Mapping):
        raise TypeError(f"columns are a mapping by name, not {type(columns).__name__}")
    encoded = {name: _encode_column(name, rows) for name, rows in columns.items()}
    lengths = {name: len(rows) for name, rows in encoded.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"columns have one row for each sample, and these have {lengths or 'none at all'}")
    return encoded, next(iter(lengths.values()))


def _encode_column(name: str, rows: Any) -> list[Row]:
    if _is_handle(rows):
        return [Held(rows, i) for i in range(len(rows))]
    # Of sets, each has an order of its own: rows would come to those of other samples.
    if isinstance(rows, str | bytes | Mapping | set | frozenset) or not isinstance(rows, Iterable):
        raise TypeError(
            f"column {name!r} is a sequence of rows or a handle on them, not {type(rows).__name__}"
        )
    return [_encode_row(name, row) for row in rows]


def _is_handle(value: Any) -> bool:
    return _kind_of(value.__class__) == "handle"


@cache
def _kind_of(cls: type) -> Literal["array", "handle", "kept", "tensor", "value"]:
    if issubclass(cls, ObjectRef):
        return "kept"
    if (cls.__module__, cls.__name__) == ("numpy", "ndarray"):
        return "array"
    if hasattr(cls, "untyped_storage"):
        return "tensor"
    members = ("__len__", "select", "join_rows")  # as `RowHandles` says; to ask that takes long
    return "handle" if all(hasattr(cls, member) for member in members) else "value"


def _encode_row(name: str, row: Any) -> Row:
    kind = _kind_of(row.__class__)
    if kind in ("handle", "kept"):
        return Held(row, None)
    if kind == "array" and is_plain(row):
        return encode_array(row)
    if kind == "tensor":  # it would be pickled with all that it is a view of
        row = row.detach().clone()
    try:
        data = pickle.dumps(row, protocol=5)
    except Exception as error:  # whatever the row's own methods raise
        raise TypeError(f"a row of column {name!r} can't be pickled: {error}") from error
    if b"torch" in data:
        data = _without_the_rest(row)
    if b"ObjectRef" in data:
        _check_for_references(name, row)
    if b"__main__" in data:  # by reference, which nobody else could resolve
        return bytes(cloudpickle.dumps(row))  # type: ignore[no-untyped-call]
    return data


def _without_the_rest(row: Any) -> bytes:
    """A row pickled with tensors inside of it, but not with all that these are views of."""
    buffer = io.BytesIO()
    _Cloner(buffer, protocol=5).dump(row)
    return buffer.getvalue()


class _Cloner(pickle.Pickler):
    """Pickles copies of views."""

    def reducer_override(self, value: Any) -> Any:
        """Asked of each object that is not of Python itself."""
        if _kind_of(value.__class__) != "tensor":
            return NotImplemented
        try:
            is_view = value.untyped_storage().nbytes() > value.nbytes
        except NotImplementedError:  # a sparse one is pickled as the tensors that it is made of
            return NotImplemented
        return value.detach().clone().__reduce_ex__(5) if is_view else NotImplemented


def _check_for_references(name: str, row: Any) -> None:
    try:
        _Finder(io.BytesIO(), protocol=5).dump(row)
    except _FoundError:
        raise TypeError(
            f"a row of column {name!r} has an ObjectRef inside of it, which would lose its owner: "
            "let the reference itself be the row"
        ) from None


class _FoundError(Exception):
    """There is one."""


class _Finder(pickle.Pickler):
    """Pickles, and minds references."""

    def persistent_id(self, value: Any) -> None:
        """Asked of each object."""
        if isinstance(value, ObjectRef):
            raise _FoundError


def decode(rows: Sequence[Row]) -> Any:
    """A column of rows as it is handed to a user: one handle where all rows are of handles, else a list."""
    if rows and all(isinstance(row, Held) and row.row is not None for row in rows):
        parts = [_select(handle, group) for handle, group in _by_handle(rows)]
        return parts[0].join_rows(parts[1:]) if len(parts) > 1 else parts[0]
    return [_decode_row(row) for row in rows]


def _by_handle(rows: Iterable[Any]) -> Iterable[tuple[Any, list[int]]]:
    for _, group in groupby(rows, key=lambda held: id(held.value)):
        held = list(group)
        yield held[0].value, [row.row for row in held]


def _select(handle: Any, rows: Sequence[int]) -> Any:
    return handle if list(rows) == list(range(len(handle))) else handle.select(rows)


def _decode_row(row: Row) -> Any:
    if isinstance(row, bytes):
        return decode_array(row) if row.startswith(MARK) else pickle.loads(row)
    return row.value if row.row is None else row.value.select([row.row])
