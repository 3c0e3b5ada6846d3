"""Device memory from one process to another: CUDA IPC against a copy on the device, NCCL against itself."""

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench_broadcast import in_processes, meeting_place
from harness import Figure, figure, ratio, seconds
from raycrew.tensor_transport.process_groups import GroupHost, Invitation, join_group
from raycrew.tensor_transport.transports import CudaIpcTransport

MIB = 1 << 20


def owner(size: int, pipe: Connection) -> None:
    """Offers device memory until it is told to end."""
    with CudaIpcTransport() as transport:
        pipe.send(transport.offer(torch.full((size,), 7, dtype=torch.uint8, device="cuda")))
        pipe.recv()


def handed_over(size: int, repeat: int) -> list[Figure]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=owner, args=(size, there))
    process.start()
    source, into = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))

    def copied() -> None:
        into.copy_(source)
        torch.cuda.synchronize()

    with CudaIpcTransport() as transport:
        offer = here.recv()
        found = ratio(
            f"hand-over of {size / 1e9:g} GB by CUDA IPC: speed over a copy",
            lambda: seconds(lambda: transport.pull([offer.whole], [into]).wait(600)),
            lambda: seconds(copied),
            baseline="a copy of as many bytes on the device, within one process",
            goal=0.85,
            better="higher",
            repeat=repeat,
            invert=True,
            note=torch.cuda.get_device_name(),
        )
        transport.pull([offer.whole], [into]).wait(600)
        if int(into.min()) != 7:
            raise RuntimeError("other bytes than those offered arrived")
    here.send(None)
    process.join(60)
    return [found]


def member(pipe: Any, invitation: Invitation, address: str, size: int, rounds: int) -> None:
    """Broadcasts in both ways in turn; tells the seconds of each."""
    import torch.distributed as dist

    rank, world = invitation.rank, len(invitation.members)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=world)
    data = torch.full((size,), rank, dtype=torch.uint8, device="cuda")
    with join_group(invitation) as group:

        def ours() -> None:
            (group.receive if rank else group.send)([data], timeout_s=600).wait()

        def theirs() -> None:
            dist.broadcast(data, 0)
            torch.cuda.synchronize()

        for turn in range(2 * rounds + 2):
            act = (ours, theirs)[turn % 2]
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            act()
            if turn > 1:
                pipe.send((act.__name__, time.perf_counter() - start))
            elif int(data.max()):
                raise RuntimeError("other bytes than those sent arrived")
    dist.destroy_process_group()
    pipe.send(None)


def broadcast(devices: int, size: int, rounds: int) -> list[Figure]:
    names = ["trainer/0", *(f"generator/{rank}" for rank in range(devices - 1))]
    lease, address = meeting_place()
    with lease, GroupHost("bench", names, backend="nccl", address="127.0.0.1") as host:
        told = in_processes(member, [(one, address, size, rounds) for one in host.open()])
    slowest = [(name, max(each[i][1] for each in told)) for i, (name, _) in enumerate(told[0])]
    ours, theirs = ([taken for name, taken in slowest if name == way] for way in ("ours", "theirs"))
    return [
        figure(
            f"NCCL broadcast of {size // MIB} MiB to {devices - 1}: speed over the bare one",
            [bare / taken for taken, bare in zip(ours, theirs, strict=True)],
            unit="x",
            baseline="torch.distributed.broadcast of one tensor of the same bytes",
            better="higher",
            note=torch.cuda.get_device_name(),
        )
    ]


def run(quick: bool) -> list[Figure]:
    if not torch.cuda.is_available():
        return []
    size = 10**9 if quick else 10**10
    figures = handed_over(size, 3 if quick else 9)
    devices = torch.cuda.device_count()
    return figures + (broadcast(devices, 1024 * MIB, 2 if quick else 5) if devices > 1 else [])
