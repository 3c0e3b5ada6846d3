"""What the members of a group run while a broadcast transport is checked."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from raycrew.tensor_transport.errors import TransportTimeoutError
from raycrew.tensor_transport.testing._transports import bits_of, bounded_memory, expect, samples
from raycrew.tensor_transport.transports import BroadcastTransport, Transfer

DEADLINE_S = 60.0
MIB = 1 << 20
_TWO_BUCKETS = 72 * MIB
"""Of 32 MiB, and what a process takes beside them."""


def contents(kind: str, seed: int, device: str = "cpu") -> list[torch.Tensor]:
    """Tensors to recognise: "samples" of every kind, "tiny" (thousands of them), "oversized" or "plain"."""
    random = np.random.default_rng(seed)

    def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        size = int(np.prod(shape)) * dtype.itemsize
        raw = torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8))
        return raw.view(dtype).reshape(shape).to(device)

    if kind == "tiny":
        return [of(torch.float32, 1 + index % 7) for index in range(3000)]
    if kind == "oversized":
        return [of(torch.uint8, 3), of(torch.bfloat16, 45 * MIB), of(torch.uint8, 5)]
    if kind == "plain":
        return [of(torch.uint8, 20 * MIB)]
    return [tensor.to(device) for tensor in samples().values()]


def send_contents(
    transport: BroadcastTransport, kind: str, seed: int, timeout_s: float = DEADLINE_S, device: str = "cpu"
) -> None:
    """Send; run by a member."""
    transport.send(contents(kind, seed, device), window_bytes=MIB, timeout_s=timeout_s).wait()


def receive_contents(
    transport: BroadcastTransport, kind: str, seed: int, timeout_s: float = DEADLINE_S, device: str = "cpu"
) -> bool:
    """Receive, and say whether these were the bytes; run by a member."""
    wanted = contents(kind, seed, device)
    found = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in wanted]
    transport.receive(found, window_bytes=MIB, timeout_s=timeout_s).wait()
    counted = all(tensor._version > 0 for tensor in found if tensor.numel())  # noqa: SLF001
    expect(counted, "torch does not know that tensors were written to")
    return all(torch.equal(bits_of(one), bits_of(other)) for one, other in zip(found, wanted, strict=True))


def send_until_it_fails(transport: BroadcastTransport, size_bytes: int, marker: str, device: str) -> None:
    """Send again and again; run by a member. The marker is there once some were sent."""
    data = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    for _ in range(3):
        transport.send([data], timeout_s=DEADLINE_S).wait()
    Path(marker).touch()
    while True:
        transport.send([data], timeout_s=DEADLINE_S).wait()


def receive_until_it_fails(transport: BroadcastTransport, size_bytes: int, device: str) -> None:
    """Receive again and again; run by a member."""
    data = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    while True:
        transport.receive([data], timeout_s=DEADLINE_S).wait()


def receive_and_stop(transport: BroadcastTransport, size_bytes: int, device: str) -> None:
    """Stop this process as soon as bytes arrive, and go on once it is continued; run by a member."""
    data = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    transfer = transport.receive([data], window_bytes=MIB, timeout_s=DEADLINE_S)
    while not data[0].item() and not transfer.done():
        time.sleep(0.0001)
    os.kill(os.getpid(), signal.SIGSTOP)
    transfer.wait()
    receive_until_it_fails(transport, size_bytes, device)


def end_while_sending(transport: BroadcastTransport, how: str, size_bytes: int, device: str) -> str:
    """Send until somebody stands still, then close or cancel; run by a member. How the transfer ended."""
    data = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    transfer = transport.send([data], window_bytes=MIB, timeout_s=DEADLINE_S)
    while _ends_soon(transfer):
        transfer = transport.send([data], window_bytes=MIB, timeout_s=DEADLINE_S)
    if how == "close":
        transport.close()
    else:
        transfer.cancel()
    return type(transfer.exception(DEADLINE_S)).__name__


def _ends_soon(transfer: Transfer) -> bool:
    try:
        transfer.wait(1.0)
    except TransportTimeoutError:
        return False
    return True


def begin_in_order(transport: BroadcastTransport, role: str, device: str) -> bool:
    """Begin several transfers, and wait for them afterwards; run by a member."""
    kinds = ["plain", "samples", "tiny", "plain"]
    wanted = [contents(kind, seed, device) for seed, kind in enumerate(kinds)]
    if role == "send":
        for transfer in [transport.send(each, timeout_s=DEADLINE_S) for each in wanted]:
            transfer.wait()
        return True
    found = [[torch.empty(t.shape, dtype=t.dtype, device=device) for t in each] for each in wanted]
    for transfer in [transport.receive(each, timeout_s=DEADLINE_S) for each in found]:
        transfer.wait()
    pairs = [pair for one, other in zip(found, wanted, strict=True) for pair in zip(one, other, strict=True)]
    return all(torch.equal(bits_of(one), bits_of(other)) for one, other in pairs)


def move_within_memory(transport: BroadcastTransport, role: str, device: str) -> None:
    """Move a large buffer and many small ones in as much memory as two buckets take; run by a member."""
    value = 3 if role == "send" else 9
    sizes = [90 * MIB, *[MIB] * 100, *[7] * 1000]
    buffers = [torch.full((size,), value, dtype=torch.uint8, device=device) for size in sizes]
    begin = transport.send if role == "send" else transport.receive
    with _bounded(device):
        begin(buffers, timeout_s=DEADLINE_S).wait()
    expect(all(bool((each == 3).all()) for each in buffers), "other bytes than those sent arrived")


def _bounded(device: str) -> contextlib.AbstractContextManager[None]:
    if device == "cpu":
        return bounded_memory(_TWO_BUCKETS, "a broadcast")
    return _bounded_on_device(_TWO_BUCKETS)


@contextlib.contextmanager
def _bounded_on_device(size_bytes: int) -> Iterator[None]:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    grown = torch.cuda.max_memory_allocated() - before
    expect(grown <= size_bytes, f"a broadcast took {grown} bytes of device memory, over {size_bytes}")


def leftovers(transport: BroadcastTransport) -> tuple[int, int, int]:
    """Threads, descriptors and mappings of /dev/shm of a member that has closed its transport; run by it."""
    transport.close()
    threads, descriptors = (len(list(Path(f"/proc/self/{of}").iterdir())) for of in ("task", "fd"))
    mapped = sum("/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return threads, descriptors, mapped
