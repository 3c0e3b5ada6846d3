"""A small data-parallel training over gloo: what it sent, how long it took, where its loss went."""

import multiprocessing
import os
import socket
import struct
import time

import torch
from torch import nn

from raycrew.tensor_transport.errors import GroupMismatchError, TransportError
from raycrew.tensor_transport.process_groups._process.sockets import _connections
from raycrew.tensor_transport.process_groups.communication import CommunicationSettings, apply_communication

_BYTES_ACKED = 120


def bytes_sent():
    """Payload that this process has sent over TCP, as the kernel counts it, on connections that are open."""
    total = 0
    for connection in _connections():
        with connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        total += struct.unpack_from("=Q", info, _BYTES_ACKED)[0]
    return total


def train(settings, rank, steps=60, width=256, group=None):
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    model = nn.Sequential(
        nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )
    ddp = apply_communication(nn.parallel.DistributedDataParallel(model, process_group=group), settings)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    before, start = bytes_sent(), time.perf_counter()
    for _ in range(steps):
        inputs = torch.randn(64, 32, generator=data)
        loss = nn.functional.mse_loss(ddp(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    taken, sent = time.perf_counter() - start, bytes_sent() - before
    inputs = torch.randn(512, 32, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        final = nn.functional.mse_loss(model(inputs), teacher(inputs)).item()
        digest = sum(p.double().sum().item() for p in model.parameters())
    return sent, taken, final, digest


def train_alone(settings, rank, **options):
    """Train in a group that has no other rank, beside the default one."""
    import torch.distributed as dist

    return train(settings, rank, group=[dist.new_group([each]) for each in range(2)][rank], **options)


def differ(settings, rank):
    """What comes of it where only one rank compresses."""
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    try:
        apply_communication(ddp, settings if rank else CommunicationSettings())
    except GroupMismatchError as error:
        return str(error), sorted(error.wanted)
    return "it was set"


def set_again(settings, rank):
    """What comes of it where gradients are to travel as they are after all."""
    ddp = apply_communication(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), settings)
    try:
        apply_communication(ddp, CommunicationSettings())
    except TransportError as error:
        return str(error)
    return "it was set"


def average_apart(settings, rank):
    """A gradient that is averaged in a group of this rank alone, where the model's is of both."""
    import torch.distributed as dist

    alone = [dist.new_group([each]) for each in range(2)][rank]
    model = nn.Linear(1, 1, bias=False)
    ddp = apply_communication(nn.parallel.DistributedDataParallel(model), settings, process_group=alone)
    ddp(torch.full((1, 1), 1.0 + rank)).sum().backward()
    return model.weight.grad.item()


def _serve(connection, address, rank, variants, work, options):
    import torch.distributed as dist

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where there are some: PowerSGD of torch waits for them
    torch.set_num_threads(1)
    backend = CommunicationSettings(backend="gloo").resolve_backend()
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=2)
    found = {name: work(settings, rank, **options) for name, settings in variants.items()}
    dist.barrier()  # else whoever is first ends connections that the other one still reads
    dist.destroy_process_group()
    connection.send(found)


def train_in_two_processes(variants, work=train, **options):
    """Name -> (bytes sent, seconds, loss, sum of the weights) of each of two ranks, or what work gives."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "raycrew.tensor_transport.testing"])
    with socket.socket() as lease:
        lease.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        lease.bind(("127.0.0.1", 0))  # Bound, not listening: the store can bind over it, others can't.
        address = f"tcp://127.0.0.1:{lease.getsockname()[1]}"
        pipes = [context.Pipe() for _ in range(2)]
        processes = [
            context.Process(target=_serve, args=(theirs, address, rank, variants, work, options), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        try:
            for process in processes:
                process.start()
            for _, theirs in pipes:
                theirs.close()
            return [ours.recv() if ours.poll(200) else None for ours, _ in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join(60)
