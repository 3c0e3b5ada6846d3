"""Names that are one tensor: what is written to one of them is written to all."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raycrew.tensor_transport._bytes import is_freed


def twins_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Each name whose elements have others, too (same memory, order, dtype, sign), and the first of these.

    Tensors of one storage are told as well where that has no memory: those of a model on the meta device.
    """
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if (place := _place(tensor)) is not None:
            names.setdefault(place, []).append(name)
    return {name: same[0] for same in names.values() if len(same) > 1 for name in same}


def order_of(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The order in which a tensor has the elements of its memory: that of its views of other shapes, too.

    Returns:
        Size and stride of as few dimensions as do, the outermost one first.
    """
    found: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            size *= found.pop()[0]
        found.append((size, stride))
    return tuple(found)


def part_here(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor whose memory is this process's part; None where it has none that can be told."""
    local = getattr(tensor, "to_local", None)
    part = local() if callable(local) else tensor
    if not isinstance(part, torch.Tensor) or part.is_nested or part.layout != torch.strided:
        return None
    wraps = type(part).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return None if wraps or not part.numel() or is_freed(part) else part


def start_of(part: torch.Tensor) -> tuple[Any, int]:
    """A memory, and at which of its bytes a tensor begins."""
    if part.is_meta:
        return part.untyped_storage(), int(part.storage_offset()) * part.itemsize
    return part.device, part.data_ptr()


def _place(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What tells which elements a tensor has, here; None where that can't be told."""
    part = part_here(tensor)
    if part is None:
        return None
    whole = None if part is tensor else (tuple(part.shape), tuple(tensor.shape))
    reading = (part.dtype, part.is_conj(), part.is_neg())
    return (*start_of(part), order_of(part.shape, part.stride()), reading, whole)
