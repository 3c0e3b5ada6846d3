"""Buffers of callers as runs of bytes, checked before anything moves."""

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport._bytes import check_tensor, flat_bytes, flat_memory, tensor_over
from raycrew.tensor_transport.transports._interface.interface import Buffer


def bytes_of(buffer: Buffer, what: str) -> torch.Tensor:
    """The bytes of a buffer as uint8 of one dimension, on its device: in place where it is contiguous.

    Raises:
        TypeError: It is neither a tensor nor an array.
        ValueError: It is an array of something else than bytes.
        UnsupportedTensorError: It has no plain bytes.
    """
    if isinstance(buffer, torch.Tensor):
        check_tensor(buffer, what)
        return flat_bytes(buffer)
    array = np.ascontiguousarray(_checked(buffer, what))
    return tensor_over(array, torch.uint8, array.shape)


def memory_of(buffer: Buffer, what: str) -> torch.Tensor:
    """The memory of a buffer as uint8 of one dimension, on its device and in place: to be filled.

    Raises:
        TypeError: It is neither a tensor nor an array.
        ValueError: It is not contiguous, read-only, or an array of something else than bytes.
        UnsupportedTensorError: It has no plain bytes.
    """
    if isinstance(buffer, torch.Tensor):
        return flat_memory(buffer, what)
    array = _checked(buffer, what)
    if not array.flags.writeable or not array.flags.c_contiguous:
        raise ValueError(f"{what} is read-only or not contiguous: it can't be filled")
    return torch.from_numpy(array)


def _checked(array: object, what: str) -> npt.NDArray[np.uint8]:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{what} is a {type(array).__name__}, neither a tensor nor an array")
    if array.dtype != np.uint8 or array.ndim != 1 or isinstance(array, np.ma.MaskedArray):
        kind = f"{array.dtype}{list(array.shape)}"
        raise ValueError(
            f"{what} is a {type(array).__name__} of {kind}: arrays are 1-D, of uint8 and unmasked"
        )
    return array
