"""Why a transport can't be used in this process, one function each; None where it can. Nothing heavy."""

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch

from raycrew.tensor_transport import _ray

_CAP_SYS_PTRACE = 19
_NO_ATTACH = 3


def no_shared_memory() -> str | None:
    """`/dev/shm` has to be there, and to be written to."""
    if not os.access("/dev/shm", os.W_OK | os.X_OK):
        return "/dev/shm is not there, or may not be written to"
    return None


def no_process_vm() -> str | None:
    """The kernel has to let processes of one user read each other's memory."""
    try:
        ctypes.CDLL(None).process_vm_readv  # noqa: B018 - raises where it is missing
    except AttributeError:
        return "this system has no process_vm_readv"
    scope = _ptrace_scope()
    if scope and (scope >= _NO_ATTACH or not _may_trace_anybody()):
        return (
            f"kernel.yama.ptrace_scope is {scope}, which keeps processes of one user from reading each "
            "other's memory: set it to 0, or give them CAP_SYS_PTRACE"
        )
    return _refused_call()


def no_object_store() -> str | None:
    """Ray has to be installed, and this process connected."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed: install raycrew-tensor-transport[ray]"
    if not _ray.is_connected():
        return "this process is not connected to a Ray cluster"
    return None


def no_tcp() -> str | None:
    """Sockets are everywhere."""
    return None


def no_cuda() -> str | None:
    """A device, and a torch that can use it."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "no CUDA device is visible"


def no_nixl() -> str | None:
    """The library, and a Ray that moves tensors by it."""
    if importlib.util.find_spec("nixl") is None:
        return "NIXL is not installed: install nixl"
    if (reason := no_object_store()) is not None:
        return reason
    return None if _ray.moves_by_nixl() else "this version of Ray does not move tensors by NIXL"


def no_gloo() -> str | None:
    """torch.distributed with gloo."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return f"torch {torch.__version__} is built without gloo"
    return None


def no_nccl() -> str | None:
    """torch.distributed with NCCL, and a device."""
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} is built without NCCL"
    return no_cuda()


WHY_NOT: dict[str, Callable[[], str | None]] = {
    "shared_memory": no_shared_memory,
    "process_vm": no_process_vm,
    "object_store": no_object_store,
    "tcp": no_tcp,
    "cuda_ipc": no_cuda,
    "nixl": no_nixl,
    "gloo": no_gloo,
    "nccl": no_nccl,
}
"""Name of each transport -> what tells why it can't be used here."""


def _ptrace_scope() -> int:
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    return int(path.read_text()) if path.exists() else 0


def _may_trace_anybody() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_PTRACE & 1)
    return False


@functools.cache
def _refused_call() -> str | None:
    """A filter of system calls, as containers have them, refuses even a read of one's own memory."""
    from raycrew.tensor_transport.transports._native import readv

    source, target = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    try:
        readv.read(os.getpid(), [ctypes.addressof(source)], [ctypes.addressof(target)], [1])
    except OSError as error:
        return f"the system refuses process_vm_readv: {error}"
    return None
