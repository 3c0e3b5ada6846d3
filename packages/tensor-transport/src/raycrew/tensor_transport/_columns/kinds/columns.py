"""Columns of any kind: which kind one is, and whether its memory is shared with other readers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raycrew.tensor_transport._columns.kinds.kinds import ArrayKind, HandleKind, Kind, ListKind, TensorKind
from raycrew.tensor_transport._columns.kinds.packed import PackedTensor
from raycrew.tensor_transport._columns.kinds.ragged import RaggedTensor
from raycrew.tensor_transport._columns.kinds.ragged_kinds import PackedKind, RaggedKind
from raycrew.tensor_transport.protocols import RowHandle

_TENSOR, _ARRAY, _LIST, _HANDLE = TensorKind(), ArrayKind(), ListKind(), HandleKind()
_RAGGED, _PACKED = RaggedKind(), PackedKind()
KINDS: dict[str, Kind] = {kind.name: kind for kind in (_TENSOR, _RAGGED, _PACKED, _ARRAY, _LIST, _HANDLE)}


@dataclass(frozen=True)
class Received:
    """A column that lies in memory which others read too; it is copied before anybody may write to it."""

    value: Any


def kind_of(column: Any) -> Kind:
    """The kind of a column.

    Raises:
        TypeError: It is none.
    """
    match column:
        case Received():
            return kind_of(column.value)
        case torch.Tensor():
            return _TENSOR
        case np.ndarray():
            return _ARRAY
        case list():
            return _LIST
        case RaggedTensor():
            return _RAGGED
        case PackedTensor():
            return _PACKED
        case RowHandle():
            return _HANDLE
    raise TypeError(f"{type(column).__name__} is not a kind of column")


def is_column(value: Any) -> bool:
    """Whether a value has rows: it is of some kind and not a scalar."""
    try:
        kind_of(value)
    except TypeError:
        return False
    return bool(getattr(value, "ndim", 1))


def transform(column: Any, change: Callable[[Kind, Any], Any], *, copies: bool = False) -> Any:
    """Apply an operation of the column's kind; a received column stays marked unless it is copied."""
    kind = kind_of(column)
    if not isinstance(column, Received):
        return change(kind, column)
    changed = change(kind, column.value)
    return changed if copies and kind.gathers_into_new_memory else Received(changed)


def bare(column: Any) -> Any:
    """The column itself, be it received or not: for reading only."""
    return column.value if isinstance(column, Received) else column


def row_count(column: Any) -> int:
    """Number of rows."""
    return kind_of(column).size(bare(column))
