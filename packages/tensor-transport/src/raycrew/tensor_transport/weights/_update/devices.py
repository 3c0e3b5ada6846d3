"""Memory of buckets on any device, and what threads that hand it to each other owe each other there.

On a device a thread only queues what it does, on a stream of its own: memory that it made is no sign that
something is in it, and memory that nobody holds any more may still be read.
"""

import torch

from raycrew.tensor_transport._bytes import fresh_tensor

CPU = torch.device("cpu")


def fresh_bucket(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory with anything in it: uint8, [size_bytes]."""
    if device.type == "cpu":
        return fresh_tensor((size_bytes,), torch.uint8)
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def settle(device: torch.device) -> None:
    """Wait until what the calling thread queued on a device is done: another thread goes on from there."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def use_here(data: torch.Tensor) -> None:
    """The calling thread's stream reads memory of another thread's: it is not used anew before."""
    if data.is_cuda:
        data.record_stream(torch.cuda.current_stream(data.device))
