"""Files mapped for reading only, without a descriptor that has to be kept with the mapping."""

import ctypes
import functools
import mmap
import os
import weakref
from typing import Any

import numpy as np

from raycrew.tensor_transport.protocols import Bytes

_FAILED = ctypes.c_void_p(-1).value


def map_file(fd: int, size_bytes: int) -> Bytes:
    """The first bytes of an open file in place, read-only, until nobody has any of them.

    A mapping by Python's `mmap` keeps a descriptor: these run out, and one that somebody has closed is closed
    once more with the mapping, whichever file has its number by then.

    Raises:
        OSError: There is no address space, or no memory for one more mapping (ENOMEM).
    """
    kernel = _kernel()
    address = kernel.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"{size_bytes} bytes can't be mapped: {os.strerror(error)}")
    return np.asarray(_Mapping(kernel, address, size_bytes))


class _Mapping:
    """Presents a mapping to numpy; it goes with the last array over it."""

    def __init__(self, kernel: Any, address: int, size_bytes: int) -> None:
        weakref.finalize(self, kernel.munmap, address, size_bytes).atexit = False
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size_bytes,),
            "data": (address, True),
        }


@functools.cache
def _kernel() -> Any:
    kernel = ctypes.CDLL(None, use_errno=True)
    whole, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    kernel.mmap.argtypes = [whole, size, number, number, number, ctypes.c_long]
    kernel.mmap.restype = whole
    kernel.munmap.argtypes = [whole, size]
    return kernel
