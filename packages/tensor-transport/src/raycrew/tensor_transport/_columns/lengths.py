"""What planning microbatches asks of columns: one length per row, and the width that rows are padded to."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport._columns.kinds import bare
from raycrew.tensor_transport._columns.naming import refuse_unknown
from raycrew.tensor_transport.errors import BatchSchemaError
from raycrew.tensor_transport.protocols import RowHandle


def named_column(columns: Mapping[str, Any], arguments: Mapping[str, Any], name: str) -> str:
    """The column that an argument names."""
    key = arguments.get(name)
    if not isinstance(key, str):
        raise ValueError(f"{name} names a column, not {key!r}; there are {', '.join(columns)}")
    refuse_unknown([key], columns.keys(), name)
    return key


def padded_width(column: Any, key: str) -> int | None:
    """Padded length of a column of tokens; None where its rows have lengths of their own."""
    shape = getattr(bare(column), "shape", None)
    if shape is not None and len(shape) < 2:
        raise BatchSchemaError(
            f"column {key!r} of shape {list(shape)} does not hold tokens of shape (rows, length)",
            key=key,
            expected="(rows, length)",
            actual=tuple(shape),
        )
    return None if shape is None else int(shape[1])


def as_wide(columns: Mapping[str, Any], dim: int, width: int | None) -> list[str]:
    """The columns as wide along a dimension as planned tokens were; all but arrays where they had none."""
    return [
        key
        for key, column in columns.items()
        if (width is None and not isinstance(column, np.ndarray))
        or not isinstance(column, torch.Tensor | np.ndarray)
        or (column.ndim > dim and column.shape[dim] == width)
    ]


def row_lengths(column: Any, key: str) -> npt.NDArray[np.int64]:
    """A column of lengths, as an array."""
    column = bare(column)
    if isinstance(column, RowHandle):
        raise BatchSchemaError(
            f"column {key!r} is a handle, and its values are needed here: localize() it, "
            "or keep it out of remotize()",
            key=key,
        )
    array = column.cpu().numpy() if isinstance(column, torch.Tensor) else np.asarray(column)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise BatchSchemaError(
            f"column {key!r} does not hold one length per row: {array.dtype} of shape {array.shape}",
            key=key,
            expected="integers",
            actual=array.dtype,
        )
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= np.iinfo(np.int32).max:
        raise BatchSchemaError(
            f"column {key!r} holds lengths from {array.min()} to {array.max()}: not those of sequences",
            key=key,
            expected="lengths from 0 to 2**31 - 1",
            actual=(int(array.min()), int(array.max())),
        )
    return array.astype(np.int64)
