"""Buffers of callers on the device of a group, checked before anything is sent."""

import torch

from raycrew.tensor_transport.transports import Buffer, bytes_of, memory_of


def as_source(buffer: Buffer, index: int, device: torch.device) -> torch.Tensor:
    """The bytes of a buffer to be sent; those that are not contiguous are copied.

    Raises:
        ValueError: It is on another device, or an array of something else than bytes.
        UnsupportedTensorError: It has no plain bytes.
    """
    return _on(device, bytes_of(buffer, f"buffer {index}"), index)


def as_target(buffer: Buffer, index: int, device: torch.device) -> torch.Tensor:
    """The bytes of a buffer to be received into.

    Raises:
        ValueError: It is on another device, read-only, not contiguous, or an array of more than bytes.
        UnsupportedTensorError: It has no plain bytes.
    """
    return _on(device, memory_of(buffer, f"buffer {index}"), index)


def _on(device: torch.device, found: torch.Tensor, index: int) -> torch.Tensor:
    if found.device != device:
        raise ValueError(f"buffer {index} is on {found.device}, and this group moves bytes of {device}")
    return found
