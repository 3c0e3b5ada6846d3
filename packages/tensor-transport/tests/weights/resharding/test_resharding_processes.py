"""Three trainer processes with FSDP-like DTensors over gloo, and two tensor-parallel receivers among them."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from raycrew.tensor_transport import Layout, join_layouts, layout_of, plan_reshard
from raycrew.tensor_transport.transports.shared_memory import SharedMemoryTransport
from raycrew.tensor_transport.weights.resharding import fused, offer_shards, pull_shards, replicated, sharded

WORLD, TARGETS = 3, 2
TIMEOUT_S = 120.0


def whole():
    random = torch.Generator().manual_seed(3)
    shapes = {"q": (8, 6), "k": (4, 6), "o": (6, 8), "embed": (7, 6), "norm": (6,), "few": (2, 4)}
    return {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}


def generator_layout():
    ranks = range(TARGETS)
    parts = {name: sharded(whole()[name].shape, "bfloat16", ranks) for name in ("q", "k")}
    return Layout(
        {
            **fused(parts, "qk"),
            "o": sharded((6, 8), "bfloat16", ranks, 1),
            "embed": sharded((7, 6), "bfloat16", ranks, padded=8),
            "norm": replicated((6,), "bfloat16", ranks),
            "few": replicated((2, 4), "bfloat16", ranks),
        }
    )


def generator_state():
    shapes = {"qk": (6, 6), "o": (6, 4), "embed": (4, 6), "norm": (6,), "few": (2, 4)}
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def expected(rank):
    found = whole()
    padded = torch.cat([found["embed"], torch.zeros(1, 6, dtype=torch.bfloat16)])
    return {
        "qk": torch.cat([found["q"].chunk(TARGETS)[rank], found["k"].chunk(TARGETS)[rank]]),
        "o": found["o"].chunk(TARGETS, 1)[rank],
        "embed": padded.chunk(TARGETS)[rank],
        "norm": found["norm"],
        "few": found["few"],
    }


def gathered(value):
    found = [None] * WORLD
    dist.all_gather_object(found, value)
    return found


def update_from_shards(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole().items()}
    plan = plan_reshard(join_layouts(gathered(layout_of(state))), generator_layout())
    assert len(set(gathered((plan.source.digest, plan.target.digest)))) == 1
    with SharedMemoryTransport() as transport:
        offers = gathered(offer_shards(state, plan, rank, transport, checksums=True))
        if rank < TARGETS:
            held = generator_state()
            receipt = pull_shards(held, plan, rank, offers, transport, timeout_s=TIMEOUT_S)
            assert receipt.size_bytes == sum(t.nbytes for t in held.values()) - (12 if rank else 0)
            assert all(torch.equal(held[name], tensor) for name, tensor in expected(rank).items())
        dist.barrier()
        transport.withdraw(offers[rank].offers)
    dist.destroy_process_group()


def test_shards_of_dtensors_reach_other_processes_parameters(tmp_path):
    mp.spawn(update_from_shards, (str(tmp_path),), nprocs=WORLD)
