"""Joining tensors whose trailing dimensions differ: padded on the left or the right."""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

from raycrew.tensor_transport.errors import BatchSchemaError

Number: TypeAlias = int | float | bool
PadSide: TypeAlias = Literal["left", "right"]


def check_pad_side(side: str) -> None:
    """Raise ValueError for anything but `left` and `right`."""
    if side not in ("left", "right"):
        raise ValueError(f"pad_side is 'left' or 'right', not {side!r}")


def check_pad_value(value: object, dtype: torch.dtype, key: str) -> None:
    """Refuse a padding that would be stored as another value.

    Integers and truth values are held exactly. Fractions are rounded, as all elements of a floating-point
    dtype are, but a finite one does not become infinite, nor anything else a zero.

    Raises:
        BatchSchemaError: The dtype does not hold it.
    """
    if not isinstance(value, int | float):
        raise BatchSchemaError(
            f"column {key!r} is padded with a number, not {value!r}", key=key, actual=value
        )
    if not _holds(dtype, value):
        raise BatchSchemaError(
            f"column {key!r} of {dtype} does not hold the padding {value!r}; name one in pad_value_dict "
            "that it holds, or convert the column",
            key=key,
            expected=dtype,
            actual=value,
        )


def _holds(dtype: torch.dtype, value: float) -> bool:
    if dtype == torch.bool:
        return value in (0, 1)
    if not dtype.is_floating_point and not dtype.is_complex:
        limits = torch.iinfo(dtype)
        return (isinstance(value, int) or value.is_integer()) and limits.min <= value <= limits.max
    if torch.finfo(dtype).max < abs(value) != math.inf:
        return False
    held = torch.tensor(float(value), dtype=torch.float64).to(dtype)
    back = held.to(torch.complex128).real.item()
    if isinstance(value, int):
        return back == value
    if math.isnan(value):
        return math.isnan(back)
    return math.isinf(back) == math.isinf(value) and (back > 0, back < 0) == (value > 0, value < 0)


def join(
    tensors: Sequence[torch.Tensor], key: str, pad_value: Number | None = 0, pad_side: PadSide = "right"
) -> torch.Tensor:
    """Concatenate along the first dimension; other dimensions that differ are padded to the longest.

    Args:
        tensors: At least one, of equal dtype and number of dimensions.
        key: The column, for the error.
        pad_value: What to fill with; None forbids padding.
        pad_side: Where the filling goes.

    Raises:
        BatchSchemaError: dtypes or numbers of dimensions differ, or shapes do and padding is forbidden, or
            the dtype does not hold the padding.
    """
    first = tensors[0]
    for other in tensors[1:]:
        if other.dtype != first.dtype or other.ndim != first.ndim:
            raise BatchSchemaError(
                f"column {key!r}: {other.dtype} of {other.ndim} dimensions does not join {first.dtype} of "
                f"{first.ndim}; nothing is converted silently",
                key=key,
                expected=(first.dtype, first.ndim),
                actual=(other.dtype, other.ndim),
            )
    if pad_value:
        check_pad_value(pad_value, first.dtype, key)
    inner = tuple(max(lengths) for lengths in zip(*(t.shape[1:] for t in tensors), strict=True))
    if all(t.shape[1:] == inner for t in tensors):
        return torch.cat(list(tensors))
    if pad_value is None:
        shapes = sorted({tuple(t.shape[1:]) for t in tensors})
        raise BatchSchemaError(
            f"column {key!r}: rows of shapes {shapes} differ; from_batches() pads them",
            key=key,
            expected=shapes[0],
        )
    check_pad_value(pad_value, first.dtype, key)
    return _padded(tensors, inner, pad_value, pad_side)


def _padded(
    tensors: Sequence[torch.Tensor], inner: tuple[int, ...], pad_value: Number, pad_side: PadSide
) -> torch.Tensor:
    first = tensors[0]
    joined = first.new_full((sum(len(t) for t in tensors), *inner), pad_value)
    start = 0
    for tensor in tensors:
        window = joined[start : start + len(tensor)]
        for dim, length in enumerate(tensor.shape[1:], start=1):
            window = window.narrow(dim, inner[dim - 1] - length if pad_side == "left" else 0, length)
        window.copy_(tensor)
        start += len(tensor)
    return joined


def padded_to(
    tensor: torch.Tensor, shape: Sequence[int], pad_value: Number, pad_side: PadSide = "right"
) -> torch.Tensor:
    """A tensor made larger; itself if it has that shape."""
    if list(tensor.shape) == list(shape):
        return tensor
    padded = tensor.new_full(tuple(shape), pad_value)
    window = padded
    for dim, length in enumerate(tensor.shape):
        window = window.narrow(dim, shape[dim] - length if pad_side == "left" else 0, length)
    window.copy_(tensor)
    return padded
