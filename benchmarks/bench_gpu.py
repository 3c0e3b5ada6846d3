"""Device memory from one process to another: CUDA IPC against a copy on the device, NCCL against itself.

And updates of weights between workers of Ray over CUDA IPC, against copies on the device.
"""

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench_broadcast import in_processes, meeting_place
from device_workers import MODEL_BYTES, TENSORS, DeviceGenerator, DeviceTrainer
from harness import Figure, figure, ratio, seconds
from own_ray import own_ray
from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import WeightDirectory, WeightRoute, sync_weights
from raycrew.tensor_transport.process_groups import GroupHost, Invitation, join_group
from raycrew.tensor_transport.testing import take_device
from raycrew.tensor_transport.transports import CudaIpcTransport
from raycrew.worker_groups import RayWorkerGroup

KIB, MIB = 1 << 10, 1 << 20


def owner(sizes: Sequence[int], pipe: Connection) -> None:
    """Offers device memory until it is told to end."""
    with CudaIpcTransport() as transport:
        held = [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for size in sizes]
        pipe.send([transport.offer(each) for each in held])
        pipe.recv()


def handed_over(size: int, repeat: int) -> list[Figure]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=owner, args=((size, KIB), there))
    process.start()
    there.close()  # If it dies, what is received is the end.
    source, into = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))

    def copied() -> None:
        into.copy_(source)
        torch.cuda.synchronize()

    with CudaIpcTransport() as transport:
        offer, small = here.recv()
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
        taken = [
            1e3 * seconds(lambda: transport.pull([small.whole], [into[:KIB]]).wait(600))
            for _ in range(20 * repeat)
        ]
        fixed = figure("hand-over of 1 KiB by CUDA IPC", taken, unit="ms", baseline="none: a plain time")
        transport.pull([offer.whole], [into]).wait(600)
        if int(into.min()) != 7:
            raise RuntimeError("other bytes than those offered arrived")
    here.send(None)
    process.join(60)
    return [found, fixed]


def updates(repeat: int) -> list[Figure]:
    """Of a model that is on the device for the trainer as for the generator."""
    with (
        own_ray(1024),
        WeightDirectory.start() as directory,
        WeightRoute("cuda_ipc", device="cuda") as route,
        RayVirtualCluster([1], use_gpus=True, max_colocated_worker_groups=2) as cluster,
        RayWorkerGroup(cluster, DeviceTrainer, directory=directory) as trainer,
        RayWorkerGroup(cluster, DeviceGenerator, directory=directory) as generator,
    ):

        def update() -> None:
            options = {"prepare": "prepare_weights", "directory": directory, "route": route}
            sync_weights(trainer, [generator], **options)

        found = [
            ratio(
                f"update of {MODEL_BYTES / 1e9:.3g} GB in {TENSORS} tensors over CUDA IPC: copies",
                lambda: seconds(update),
                lambda: trainer.call("copy").get_results()[0],
                baseline="the tensors copied on the device, within one process",
                repeat=repeat,
                note=torch.cuda.get_device_name(),
            )
        ]
        if generator.call("sums").get_results() != trainer.call("sums").get_results():
            raise RuntimeError("other weights than those published arrived")
    return found


def member(pipe: Any, invitation: Invitation, address: str, size: int, rounds: int) -> None:
    """Broadcasts in both ways in turn; tells the seconds of each."""
    import torch.distributed as dist

    rank, world = invitation.rank, len(invitation.members)
    take_device(rank, world, torch.cuda.device_count())
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


def broadcast(members: int, size: int, rounds: int) -> list[Figure]:
    """From one process to others: on a device each, or on the only one, over sockets."""
    names = ["trainer/0", *(f"generator/{rank}" for rank in range(members - 1))]
    way = "over sockets, all on one device" if torch.cuda.device_count() < members else "a device each"
    lease, address = meeting_place()
    with lease, GroupHost("bench", names, backend="nccl", address="127.0.0.1") as host:
        told = in_processes(member, [(one, address, size, rounds) for one in host.open()])
    slowest = [(name, max(each[i][1] for each in told)) for i, (name, _) in enumerate(told[0])]
    ours, theirs = ([taken for name, taken in slowest if name == whose] for whose in ("ours", "theirs"))
    return [
        figure(
            f"NCCL broadcast of {size // MIB} MiB to {members - 1}, {way}: speed over the bare one",
            [bare / taken for taken, bare in zip(ours, theirs, strict=True)],
            unit="x",
            baseline="torch.distributed.broadcast of one tensor of the same bytes",
            better="higher",
            note=torch.cuda.get_device_name(),
        )
    ]


def run(quick: bool) -> Iterator[Figure]:
    if not torch.cuda.is_available():
        return
    yield from handed_over(10**9 if quick else 10**10, 3 if quick else 9)
    yield from updates(3 if quick else 9)
    devices = torch.cuda.device_count()
    yield from broadcast(max(devices, 2), (1024 if devices > 1 else 256) * MIB, 2 if quick else 5)
