"""Buffers of callers as runs of bytes, checked before anything is sent."""

import math

import torch

from raycrew.tensor_transport._bytes import check_tensor, tensor_over
from raycrew.tensor_transport.transports import Buffer

_PAIRS = {getattr(torch, "float4_e2m1fn_x2", None)}


def as_source(buffer: Buffer, index: int, device: torch.device) -> torch.Tensor:
    """The bytes of a buffer to be sent; those that are not contiguous are copied.

    Raises:
        ValueError: It is on another device, or an array of something else than bytes.
        UnsupportedTensorError: It has no plain bytes.
    """
    if not isinstance(buffer, torch.Tensor):
        return _array(buffer, index, device)
    _check_bytes(buffer, index)
    _check_device(buffer.device, index, device)
    return _flat(buffer.detach().resolve_conj().resolve_neg().contiguous())


def as_target(buffer: Buffer, index: int, device: torch.device) -> torch.Tensor:
    """The bytes of a buffer to be received into.

    Raises:
        ValueError: It is on another device, read-only, not contiguous, or an array of more than bytes.
        UnsupportedTensorError: It has no plain bytes.
    """
    if not isinstance(buffer, torch.Tensor):
        if not buffer.flags.writeable:
            raise ValueError(f"buffer {index} is read-only: nothing can be received into it")
        return _array(buffer, index, device)
    _check_bytes(buffer, index)
    _check_device(buffer.device, index, device)
    if not buffer.is_contiguous() or buffer.is_conj() or buffer.is_neg():
        raise ValueError(f"buffer {index} is not contiguous: receive into one that is, and copy it")
    return _flat(buffer.detach())


def _array(buffer: Buffer, index: int, device: torch.device) -> torch.Tensor:
    dtype, shape = str(buffer.dtype), tuple(buffer.shape)
    if dtype != "uint8" or len(shape) != 1 or not buffer.flags.c_contiguous:  # type: ignore[union-attr]
        raise ValueError(f"buffer {index} is {dtype}{list(shape)}: arrays are contiguous, 1-D and of uint8")
    _check_device(torch.device("cpu"), index, device)
    return tensor_over(buffer, torch.uint8, (math.prod(shape),))  # type: ignore[arg-type]


def _check_bytes(tensor: torch.Tensor, index: int) -> None:
    """Refuse what has no plain bytes; elements of four bits come in pairs, as bytes."""
    check_tensor(tensor.view(torch.uint8) if tensor.dtype in _PAIRS else tensor, f"buffer {index}")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # A single element may have any stride and still be contiguous.
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def _check_device(found: torch.device, index: int, wanted: torch.device) -> None:
    if found != wanted:
        raise ValueError(f"buffer {index} is on {found}, and this group moves bytes of {wanted}")
