"""Sharing of device memory between processes, by the CUDA driver itself; loaded when first used."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch

from raycrew.tensor_transport.errors import TransportError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class _Memory:
    """Device memory at an address, as torch takes it in."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def export(tensor: torch.Tensor) -> tuple[bytes, int]:
    """A handle of the allocation that a tensor lies in, and the tensor's offset in it.

    Raises:
        TransportError: The driver refuses, as it does for memory of `expandable_segments`.
    """
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    with torch.cuda.device(tensor.device):
        address = ctypes.c_uint64(tensor.data_ptr())
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(bytearray(handle)), tensor.data_ptr() - base.value


@contextlib.contextmanager
def opened(handle: bytes, offset: int, size_bytes: int, device: int) -> Iterator[torch.Tensor]:
    """Another process's memory, as a tensor of uint8 that must not be kept.

    Raises:
        TransportError: Its owner is gone, or the device can't reach it.
    """
    base = ctypes.c_uint64()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # The runtime gives this thread the context; the driver does not.
        exported = _Handle.from_buffer_copy(handle)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), exported, _LAZY_PEER_ACCESS)
        try:
            yield torch.as_tensor(_Memory(base.value + offset, size_bytes), device=f"cuda:{device}")
        finally:
            _call("cuIpcCloseMemHandle", base)


def device_of(uuid: str) -> int | None:
    """The number of a device in this process; None where it does not see it."""
    for i in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(i).uuid) == uuid:
            return i
    return None


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        why = (text.value or b"unknown").decode()
        raise TransportError(f"the CUDA driver's {name} failed with {code}: {why}")


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
