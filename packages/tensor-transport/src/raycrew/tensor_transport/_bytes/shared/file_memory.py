"""Files mapped without a descriptor that has to be kept with the mapping, or kept open by one."""

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from raycrew.tensor_transport.protocols import Bytes

_FAILED = ctypes.c_void_p(-1).value


_NONE = 0  # Linux's PROT_NONE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_WAYS = {
    "read": (mmap.PROT_READ, mmap.MAP_SHARED),
    "write": (_READ_WRITE, mmap.MAP_SHARED),
    "private": (_READ_WRITE, mmap.MAP_PRIVATE),
}


def map_file(fd: int, size_bytes: int, way: Literal["read", "write", "private"] = "read") -> Bytes:
    """The first bytes of an open file in place, until nobody has any of them.

    What is written to a private mapping stays in it. The file stays open, with its locks, for as long as the
    mapping lives.

    A mapping by Python's `mmap` keeps a descriptor: these run out, and one that somebody has closed is closed
    once more with the mapping, whichever file has its number by then.

    Raises:
        OSError: There is no address space, or no memory for one more mapping (ENOMEM).
    """
    return np.asarray(_Mapping(_map(fd, size_bytes, *_WAYS[way]), size_bytes, is_read_only=way == "read"))


def hold_open(fd: int) -> Callable[[], object]:
    """Keep an open file open, with its locks, whoever closes its descriptor; what is given ends that.

    Raises:
        OSError: There is no memory for one more mapping (ENOMEM).
    """
    return functools.partial(_kernel().munmap, _map(fd, mmap.PAGESIZE, _NONE, mmap.MAP_SHARED), mmap.PAGESIZE)


class _Mapping:
    """Presents a mapping to numpy; it goes with the last array over it."""

    def __init__(self, address: int, size_bytes: int, *, is_read_only: bool) -> None:
        weakref.finalize(self, _kernel().munmap, address, size_bytes).atexit = False
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size_bytes,),
            "data": (address, is_read_only),
        }


def _map(fd: int, size_bytes: int, protection: int, flags: int) -> int:
    address: int = _kernel().mmap(None, size_bytes, protection, flags, fd, 0)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"{size_bytes} bytes can't be mapped: {os.strerror(error)}")
    return address


@functools.cache
def _kernel() -> Any:
    kernel = ctypes.CDLL(None, use_errno=True)
    whole, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    kernel.mmap.argtypes = [whole, size, number, number, number, ctypes.c_long]
    kernel.mmap.restype = whole
    kernel.munmap.argtypes = [whole, size]
    return kernel
