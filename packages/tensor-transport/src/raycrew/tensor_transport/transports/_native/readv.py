"""The system call `process_vm_readv`, and nothing else."""

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any

MAX_RUNS = 1024
"""Runs in one call: IOV_MAX of Linux."""


class _Run(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def read(pid: int, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]) -> int:
    """Copy runs of another process's memory to addresses of this one; how many bytes that were.

    Fewer than wanted were copied where the other process has no memory at some address.

    Raises:
        OSError: There is no such process (ESRCH), it may not be read (EPERM), or has no memory there
            (EFAULT).
    """
    count = len(sizes)
    remote = (_Run * count)(*(_Run(*run) for run in zip(sources, sizes, strict=True)))
    local = (_Run * count)(*(_Run(*run) for run in zip(targets, sizes, strict=True)))
    done: int = _call()(pid, local, count, remote, count, 0)
    if done < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return done


@functools.cache
def _call() -> Any:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    runs, number = ctypes.POINTER(_Run), ctypes.c_ulong
    call.argtypes = [ctypes.c_int, runs, number, runs, number, number]
    call.restype = ctypes.c_ssize_t
    return call
