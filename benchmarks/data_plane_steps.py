"""Steps of remotize, dispatch, localize and release: what is left of them in every process.

Memory is each process's anonymous memory: pages of the object store, which all map, are not in it.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch

from data_plane import MIB, check
from harness import Figure, figure
from raycrew.tensor_transport import (
    BatchedDataDict,
    ObjectStoreBackend,
    ShardRegistry,
    localize,
    release,
    remotize,
)

LOOKS = 5


class Worker:
    """Reads its share of a batch, and stores what it made of it."""

    def __init__(self, stores: ObjectStoreBackend) -> None:
        self._registry = ShardRegistry(stores)

    def step(self, batch: Any, number: int) -> Any:
        local = localize(batch, self._registry)
        local["reward"] = local["ids"].sum(dim=1)
        return remotize(local, self._registry, step=number)


def own_memory(_actor: object = None) -> float:
    """MiB of this process that nobody else has."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def steps(quick: bool) -> list[Figure]:
    """In a cluster that runs already."""
    count, warm_up = (60, 40) if quick else (200, 100)
    stores = ObjectStoreBackend.start()
    registry = ShardRegistry(stores)
    workers = [ray.remote(Worker).options(num_cpus=0).remote(stores) for _ in range(2)]
    rows = torch.arange(4096 * 256).reshape(4096, 256)

    def one(number: int) -> None:
        batch = remotize(BatchedDataDict(ids=rows), registry, step=number)
        parts = zip(workers, batch.shard(2), strict=True)
        done = ray.get([worker.step.remote(part, number) for worker, part in parts])
        rewards = localize([part["reward"] for part in done], registry)
        check(torch.equal(torch.cat(rewards), rows.sum(dim=1)), "a step's rewards")
        release([batch, done], registry)

    actors = {"worker": workers, "store": [stores._stores[node] for node in stores.node_ids]}  # noqa: SLF001
    growth = _growth(one, count, warm_up, actors)
    held = stores.stats().held_bytes
    for worker in workers:
        ray.kill(worker)
    stores.close()
    moved = f"{count * rows.nbytes * 2 // MIB} MiB stored meanwhile"
    return [
        figure(f"{count} steps: bytes held at the end", [held], unit="B", baseline="the start", goal=0),
        *(
            figure(f"{count} steps: growth of a {who}", grown, unit="MiB", baseline=moved, goal=4)
            for who, grown in growth.items()
        ),
    ]


def _growth(
    one: Callable[[int], None], count: int, warm_up: int, actors: dict[str, list[Any]]
) -> dict[str, list[float]]:
    """By how much the processes of each kind grew, the driver's first."""

    def memory() -> dict[str, list[float]]:
        found = {
            who: ray.get([a.__ray_call__.remote(own_memory) for a in few]) for who, few in actors.items()
        }
        return {"driver": [own_memory()]} | found

    looks = []
    for number in range(warm_up + count):
        one(number)
        if warm_up <= number < warm_up + LOOKS or number >= warm_up + count - LOOKS:
            looks.append(memory())

    def lowest(some: list[dict[str, list[float]]], who: str) -> list[float]:
        """Of each process: what the allocator keeps for a while differs from step to step."""
        return [min(readings) for readings in zip(*(look[who] for look in some), strict=True)]

    return {
        who: [
            max(0.0, after - before)
            for before, after in zip(lowest(looks[:LOOKS], who), lowest(looks[LOOKS:], who), strict=True)
        ]
        for who in looks[0]
    }
