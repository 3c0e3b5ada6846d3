"""What is taken as a column; anything that would lose a part of its meaning is refused by name."""

from typing import Any

import numpy as np
import torch

from raycrew.tensor_transport._bytes import is_freed
from raycrew.tensor_transport._columns.kinds.columns import is_column
from raycrew.tensor_transport._columns.kinds.packed import PackedTensor, segments_of
from raycrew.tensor_transport._columns.kinds.ragged import RaggedTensor
from raycrew.tensor_transport._rows import refuse_special_array
from raycrew.tensor_transport.errors import BatchSchemaError


def accept_column(key: str, column: Any) -> Any:
    """The column as it is kept.

    Raises:
        TypeError: The key is no string.
        BatchSchemaError: The value is no column; the error says why.
    """
    if not isinstance(key, str):
        raise TypeError(f"columns are named by strings, not by {key!r}")
    if isinstance(column, tuple):
        column = list(column)
    for tensor in _tensors(column):
        _refuse_special_tensor(key, tensor)
    try:
        refuse_special_array(column, f"column {key!r}")
    except TypeError as error:
        raise BatchSchemaError(str(error), key=key, actual=type(column).__name__) from None
    if not is_column(column):
        raise BatchSchemaError(
            f"column {key!r} is a {type(column).__name__} without a batch dimension; a column is a tensor, "
            "array or list with one entry per row, anything else belongs into .metadata",
            key=key,
            actual=type(column).__name__,
        )
    return np.asarray(column) if isinstance(column, np.memmap) else column


def _tensors(column: Any) -> list[torch.Tensor]:
    """The tensors that a column consists of; those within lists are objects like others."""
    match column:
        case RaggedTensor():
            found = [column.values]
        case PackedTensor():
            found = [segment for row in column.tensors for segment in segments_of(row)]
        case _:
            found = [column]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def _refuse_special_tensor(key: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        name = type(tensor).__name__
        what, advice = f"a tensor of class {name}", "pass the plain torch.Tensor, and what else it says apart"
    elif tensor.is_nested or tensor.layout != torch.strided:
        what = "a nested or sparse tensor"
        advice = "use RaggedTensor.from_rows(tensor.unbind()) or to_dense()"
    elif tensor.is_quantized:
        what, advice = f"a quantised tensor ({tensor.dtype})", "pass int_repr() and the scale apart"
    elif not tensor.is_meta and is_freed(tensor):
        what, advice = "a tensor whose memory was freed", "sharded models do that: gather it first"
    else:
        return
    message = f"column {key!r} is {what}; {advice}"
    raise BatchSchemaError(message, key=key, actual=type(tensor).__name__)
