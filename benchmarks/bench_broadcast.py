"""Broadcasts in groups of our own against torch.distributed's; training with compressed gradients."""

import multiprocessing
import os
import socket
import struct
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness import Figure, figure
from raycrew.tensor_transport.process_groups import GroupHost, Invitation, join_group
from raycrew.tensor_transport.process_groups.communication import (
    CommunicationSettings,
    PowerSGD,
    apply_communication,
)
from raycrew.tensor_transport.transports import SharedMemoryTransport, choose_transport, member_facts

MIB = 1 << 20
_BYTES_ACKED = 120


def member(pipe: Any, invitation: Invitation, address: str, size: int, bucket: int, rounds: int) -> None:
    """Broadcasts in all ways in turn; tells the seconds of each, as the slowest member sees them."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world = invitation.rank, len(invitation.members)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    flat = torch.full((size,), rank, dtype=torch.uint8)
    buckets = list(flat.split(bucket))
    facts: list[Any] = [None] * world
    dist.all_gather_object(facts, member_facts())
    chosen = choose_transport(facts, "broadcast").name
    if chosen != "shared_memory":
        raise RuntimeError(f"{chosen} was chosen between processes of one machine")
    with join_group(invitation) as group, SharedMemoryTransport(arena_bytes=bucket) as memory:

        def ours() -> None:
            (group.receive if rank else group.send)(buckets, timeout_s=600).wait()

        def theirs() -> None:
            dist.broadcast(flat, 0)

        def shared() -> None:
            told = [[memory.offer(each) for each in buckets] if rank == 0 else None]
            dist.broadcast_object_list(told)
            mapped = [memory.map(offer) for offer in told[0] or ()]
            held.append((told[0] or (), mapped))

        held: list[tuple[Any, Any]] = []
        orders = ((ours, theirs, shared), (shared, theirs, ours))
        for turn in range(3 * rounds + 3):
            act = orders[turn // 3 % 2][turn % 3]
            dist.barrier()
            start = time.perf_counter()
            act()
            dist.barrier()
            if turn > 2:
                pipe.send((act.__name__, time.perf_counter() - start))
            elif int(flat.max()) or any(int(each[-1]) for _, mapped in held for each in mapped):
                raise RuntimeError("other bytes than those sent arrived")
            while held:
                offers, mapped = held.pop()
                del mapped
                dist.barrier()
                if rank == 0:
                    memory.withdraw(offers)
    dist.destroy_process_group()
    pipe.send(None)


def trainer(pipe: Any, address: str, rank: int, steps: int) -> None:
    """Trains with each kind of gradients; tells seconds, bytes and the loss."""
    import torch.distributed as dist

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where there are some: PowerSGD of torch waits for them
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    for name, settings in KINDS.items():
        pipe.send((name, *train(settings, rank, steps)))
    dist.barrier()  # else whoever is first ends connections that the other one still reads
    dist.destroy_process_group()
    pipe.send(None)


KINDS = {
    "plain": CommunicationSettings(),
    "fp16": CommunicationSettings(gradient_compression="fp16"),
    "bf16": CommunicationSettings(gradient_compression="bf16"),
    "PowerSGD of rank 4": CommunicationSettings(gradient_compression=PowerSGD(rank=4, start_step=2)),
}


def train(settings: CommunicationSettings, rank: int, steps: int) -> tuple[float, float, float]:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    sizes = [64, 1024, 1024, 1]
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    model = apply_communication(nn.parallel.DistributedDataParallel(nn.Sequential(*layers[:-1])), settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    data = torch.Generator().manual_seed(rank)
    before, start = bytes_sent(), time.perf_counter()
    for _ in range(steps):
        inputs = torch.randn(64, 64, generator=data)
        loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    taken, sent = time.perf_counter() - start, bytes_sent() - before
    inputs = torch.randn(1024, 64, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return taken, sent, nn.functional.mse_loss(model.module(inputs), teacher(inputs)).item()


def bytes_sent() -> int:
    """Payload sent over the open TCP connections of this process, as the kernel counts it."""
    total = 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    total += struct.unpack_from("=Q", info, _BYTES_ACKED)[0]
        except (OSError, struct.error):
            continue
    return total


def in_processes(target: Any, arguments: list[tuple[Any, ...]]) -> list[list[Any]]:
    """What each process tells until it says None."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in arguments]
    processes = [
        context.Process(target=target, args=(theirs, *args), daemon=True)
        for (_, theirs), args in zip(pipes, arguments, strict=True)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    told = [list(iter(ours.recv, None)) for ours, _ in pipes]
    for process in processes:
        process.join(60)
    return told


def meeting_place() -> tuple[socket.socket, str]:
    """A port that is kept: bound, not listening, so that torch's store can bind over it."""
    lease = socket.socket()
    lease.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    lease.bind(("127.0.0.1", 0))
    return lease, f"tcp://127.0.0.1:{lease.getsockname()[1]}"


def broadcasts(receivers: int, size: int, rounds: int) -> list[Figure]:
    names = ["trainer/0", *(f"generator/{rank}" for rank in range(receivers))]
    lease, address = meeting_place()
    with lease, GroupHost("bench", names, backend="gloo") as host:
        told = in_processes(member, [(one, address, size, 32 * MIB, rounds) for one in host.open()])
    slowest = [(name, max(each[i][1] for each in told)) for i, (name, _) in enumerate(told[0])]
    ours, theirs, shared = (
        [taken for name, taken in slowest if name == way] for way in ("ours", "theirs", "shared")
    )
    return [
        figure(
            f"gloo broadcast of {size // MIB} MiB to {receivers}: speed over one flat call",
            [flat / taken for taken, flat in zip(ours, theirs, strict=True)],
            unit="x",
            baseline="torch.distributed.broadcast of one tensor of the same bytes",
            goal=0.9,
            better="higher",
        ),
        figure(
            f"shared memory, chosen on one node, to {receivers}: speed over gloo",
            [taken / mapped for taken, mapped in zip(ours, shared, strict=True)],
            unit="x",
            baseline="the gloo broadcast above; offered as copies, and mapped by all receivers",
            goal=3.0,
            better="higher",
        ),
    ]


def gradients(steps: int) -> list[Figure]:
    lease, address = meeting_place()
    with lease:
        told = in_processes(trainer, [(address, rank, steps) for rank in range(2)])
    found = {name: values for name, *values in told[0]}
    taken, sent, loss = found.pop("plain")
    figures = []
    for name, values in found.items():
        against = f"the same training, gradients as they are (loss {loss:.4g}, here {values[2]:.4g})"
        ratios = {"bytes": values[1] / sent, "time": values[0] / taken, "loss": values[2] / loss}
        for what, value in ratios.items():
            figures.append(figure(f"DDP on gloo, {name}: {what}", [value], unit="x", baseline=against))
    return figures


def run(quick: bool) -> list[Figure]:
    size, rounds = (64 * MIB, 2) if quick else (1024 * MIB, 4)
    figures = [found for n in (1, 2, 3) for found in broadcasts(n, size, rounds)]
    return figures + gradients(10 if quick else 100)
