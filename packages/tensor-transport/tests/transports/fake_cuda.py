"""Stands for CUDA where there is none: "device memory" is that of processes, and handles name it."""

import contextlib
import dataclasses
import os
import struct
from types import SimpleNamespace

import numpy as np
import torch

from raycrew.tensor_transport.errors import TransportError
from raycrew.tensor_transport.transports import CudaIpcTransport, bytes_of, cuda_ipc
from raycrew.tensor_transport.transports._native import readv

_HANDLE = struct.Struct("<QQ")


class Opened:
    """Another process's memory: copied where it is looked at."""

    device = torch.device("cpu")

    def __init__(self, pid, address, size_bytes):
        self.place = pid, address, size_bytes

    def __getitem__(self, part):
        pid, address, size_bytes = self.place
        start, stop, _ = part.indices(size_bytes)
        found = np.empty(stop - start, np.uint8)
        try:
            done = readv.read(pid, [address + start], [found.ctypes.data], [found.nbytes])
        except OSError as error:
            raise TransportError(f"the driver fails: {error}") from error
        if done < found.nbytes:
            raise TransportError("the driver fails: there is no memory any more")
        return torch.from_numpy(found)

    def cpu(self):
        return self[:]


def export(tensor):
    return _HANDLE.pack(os.getpid(), tensor.data_ptr()).ljust(64, b"\0"), 0


@contextlib.contextmanager
def opened(handle, offset, size_bytes, device):
    pid, address = _HANDLE.unpack_from(handle)
    if pid == os.getpid():
        raise TransportError("the driver does not open what is this process's own")
    yield Opened(pid, address + offset, size_bytes)


class FakeTorch:
    """torch, but for its streams and devices."""

    cuda = SimpleNamespace(
        Stream=lambda device: None,
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=lambda device: SimpleNamespace(
            synchronize=lambda: None,
            record_event=lambda: SimpleNamespace(synchronize=lambda: None),
        ),
        get_device_properties=lambda device: SimpleNamespace(uuid="GPU-0"),
    )

    def empty(self, *shape, dtype, device):
        return torch.empty(*shape, dtype=dtype)

    def __getattr__(self, name):
        return getattr(torch, name)


class OnFakeDevice(CudaIpcTransport):
    """The transport over the driver above, in whatever process it is made."""

    def __init__(self):
        cuda_ipc.torch = FakeTorch()
        cuda_ipc.cuda_driver = SimpleNamespace(export=export, opened=opened, device_of=lambda uuid: 0)
        cuda_ipc._device_bytes = lambda data: bytes_of(data, "what is offered")
        cuda_ipc._BLOCK = 8 << 20
        super().__init__()

    def available(self):
        return None

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, devices=("cpu",))


@contextlib.contextmanager
def faked():
    """What `OnFakeDevice` changes in this process is as it was afterwards."""
    names = ("torch", "cuda_driver", "_device_bytes", "_BLOCK")
    before = {name: getattr(cuda_ipc, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(cuda_ipc, name, value)
