"""Names that are one tensor: what is written to one of them is written to all."""

from collections.abc import Mapping
from typing import Any

import torch


def twins_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Each name whose elements (memory, shape and dtype) have other names, too, and the first of these.

    Tensors of one storage are told as well where that has no memory: those of a model on the meta device.
    """
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if (place := _place(tensor)) is not None:
            names.setdefault(place, []).append(name)
    return {name: same[0] for same in names.values() if len(same) > 1 for name in same}


def _place(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What tells which elements a tensor has, here; None where that can't be told."""
    local = getattr(tensor, "to_local", None)
    part = local() if callable(local) else tensor
    if not isinstance(part, torch.Tensor) or part.is_nested or part.layout != torch.strided:
        return None
    wraps = type(part).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if wraps or not part.numel():
        return None
    first = (part.untyped_storage(), part.storage_offset()) if part.is_meta else part.data_ptr()
    return (part.device, first, tuple(part.shape), part.stride(), part.dtype, tuple(tensor.shape))
