"""Weights from four FSDP shards to two tensor-parallel ones, their plans, and updates by what changed."""

import gc
import time

import numpy as np
import torch

from harness import Figure, figure, ratio, seconds
from raycrew.tensor_transport import DeltaSource, Layout, plan_reshard
from raycrew.tensor_transport.transports.process_vm import ProcessVmTransport
from raycrew.tensor_transport.transports.shared_memory import SharedMemoryTransport
from raycrew.tensor_transport.weights._publishing.placing import PlanCache, TensorSpec
from raycrew.tensor_transport.weights.resharding import offer_shards, pull_shards, replicated, sharded

MIB = 1 << 20
SHAPES = {
    "q": ((4096, 4096), 0),
    "k": ((1024, 4096), 0),
    "v": ((1024, 4096), 0),
    "o": ((4096, 4096), 1),
    "gate": ((11264, 4096), 0),
    "up": ((11264, 4096), 0),
    "down": ((4096, 11264), 1),
    "norm": ((4096,), None),
}


def shapes(layers: int, name: str = "layers") -> dict[str, tuple[tuple[int, ...], int | None]]:
    return {f"{name}.{i}.{part}.weight": found for i in range(layers) for part, found in SHAPES.items()}


def fsdp(layers: int, name: str = "layers") -> Layout:
    found = shapes(layers, name).items()
    return Layout({n: sharded(shape, "bfloat16", range(4)) for n, (shape, _) in found})


def tensor_parallel(layers: int, name: str = "layers") -> Layout:
    def one(shape: tuple[int, ...], dim: int | None):
        ranks = range(2)
        return replicated(shape, "bfloat16", ranks) if dim is None else sharded(shape, "bfloat16", ranks, dim)

    return Layout({n: one(*found) for n, found in shapes(layers, name).items()})


def state_of(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    random, found = np.random.default_rng(rank), {}
    for name, tensor in layout.tensors.items():
        share = next(share for share in tensor.shares if share.rank == rank)
        raw = random.integers(0, 256, 2 * share.memory.size, np.uint8)
        found[name] = torch.from_numpy(raw).view(torch.bfloat16).reshape(share.memory.shape)
    return found


def moved(quick: bool) -> list[Figure]:
    """Shards that are there already are pulled into parameters that are there already, against one copy."""
    layers = 1
    source, target = fsdp(layers), tensor_parallel(layers)
    plan = plan_reshard(source, target)
    sources = [state_of(source, rank) for rank in range(4)]
    targets = [state_of(target, rank) for rank in range(2)]
    size = sum(move.size_bytes for move in plan.moves_to(0))
    plain, copy = np.ones(size, np.uint8), np.ones(size, np.uint8)
    figures = []
    for transport in (SharedMemoryTransport(), ProcessVmTransport()):
        offers = [offer_shards(state, plan, rank, transport) for rank, state in enumerate(sources)]
        figures.append(
            ratio(
                f"FSDP 4 to TP 2, {size // MIB} MiB by {transport.name}: speed over memcpy",
                lambda t=transport, o=offers: seconds(lambda: pull_shards(targets[0], plan, 0, o, t)),
                lambda: seconds(lambda: np.copyto(copy, plain)),
                baseline="numpy copy of the bytes of the plan for one of two ranks, in one thread",
                goal=0.5 if transport.capabilities.maps else None,
                better="higher",
                repeat=3 if quick else 9,
                invert=True,
            )
        )
        transport.close()
    whole = sum(t.size_bytes for t in target.tensors.values())
    norms = sum(t.size_bytes for n, t in target.tensors.items() if "norm" in n)
    name = "the same: bytes that move over bytes that the targets hold"
    once = [plan.size_bytes / (whole + norms)]
    return [*figures, figure(name, once, unit="x", baseline="each byte once", goal=1.0)]


def planned(quick: bool) -> list[Figure]:
    """Manifest, layouts, digests and plan of 10,000 tensors."""
    layers = 125 if quick else 1250
    first: list[float] = []
    moves: list[float] = []
    cached: list[float] = []
    manifests: list[float] = []
    for i in range(2 if quick else 5):
        source, target = fsdp(layers, f"model{i}"), tensor_parallel(layers, f"model{i}")
        whole = shapes(layers, f"model{i}").items()
        gc.collect()
        start = time.perf_counter()
        specs = [TensorSpec(name, "bfloat16", shape) for name, (shape, _) in whole]
        manifests.append(1e3 * seconds(lambda s=specs: PlanCache().plan(s, {}, 16 * MIB).digest))
        plan = plan_reshard(source, target)
        first.append(1e3 * (time.perf_counter() - start))
        moves.append(1e3 * seconds(lambda p=plan: p.moves_to(0)))
        cached.append(1e3 * seconds(lambda s=source, t=target: plan_reshard(s, t)) / first[-1])
    name = f"manifest, digests and plan of {len(source.tensors)} tensors, 4 to 2 ranks"
    return [
        figure(name, first, unit="ms", baseline="none", goal=150),
        figure("the same: the manifest and its digest", manifests, unit="ms", baseline="none"),
        figure("the same: one target's moves, written out", moves, unit="ms", baseline="none"),
        figure("the same, planned before", cached, unit="x", baseline="the first time", goal=0.02),
    ]


def changed(quick: bool) -> list[Figure]:
    """One value in a hundred changes."""
    random = np.random.default_rng(0)
    weights = {
        str(i): torch.from_numpy(random.integers(0, 256, 8 * MIB, np.uint8)).view(torch.bfloat16)
        for i in range(2 if quick else 8)
    }
    source, sizes, times = DeltaSource(), [], []
    list(source.encode(weights).tensors)
    source.commit()
    for _ in range(3):
        for tensor in weights.values():
            where = random.permutation(tensor.numel())[: tensor.numel() // 100]
            tensor.view(torch.int16)[torch.from_numpy(where)] ^= 1
        start = time.perf_counter()
        update = source.encode(weights)
        times.append(1e3 * (time.perf_counter() - start) / (update.whole_bytes / MIB))
        sizes.append(update.size_bytes / update.whole_bytes)
        source.commit()
    return [
        figure(
            "bytes of a delta, 1 % of bfloat16 values changed",
            sizes,
            unit="x",
            baseline="a full update",
            goal=0.1,
        ),
        figure("the same: time to encode one MiB of weights", times, unit="ms", baseline="none"),
    ]


def run(quick: bool) -> list[Figure]:
    torch.set_num_threads(1)
    return [*moved(quick), *planned(quick), *changed(quick)]
