"""Two hundred steps of remotize, dispatch, localize and release leave every process as it was."""

import gc
from pathlib import Path

import pytest
import torch

from raycrew.tensor_transport import (
    BatchedDataDict,
    RaggedTensor,
    ShardRegistry,
    localize,
    release,
    remotize,
)

ray = pytest.importorskip("ray")

WARM_UP, STEPS, LOOKS, ROWS = 20, 200, 5, 1024


class Worker:
    """Reads its share of a batch, and stores what it made of it."""

    def __init__(self, backend):
        self.registry = ShardRegistry(backend)

    def step(self, batch, number):
        local = localize(batch, self.registry)
        local["reward"] = local["ids"].sum(dim=1)
        return remotize(local, self.registry, step=number)


def own_memory(_actor=None):
    """Bytes of this process that nobody else has, the object store's not among them."""
    gc.collect()
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Anonymous in smaps_rollup")


@pytest.mark.long
def test_memory_of_every_process_is_flat_over_two_hundred_steps(stores):
    backend = stores
    registry = ShardRegistry(backend)
    workers = [
        ray.remote(Worker).options(num_cpus=0, resources={node: 1}).remote(backend)
        for node in ("node0", "node1")
    ]
    actors = [*workers, *backend._stores.values()]
    batch = BatchedDataDict(
        ids=torch.arange(ROWS * 256).reshape(ROWS, 256),
        response=RaggedTensor(torch.zeros(ROWS * 16), [16] * ROWS),
    )

    def memory():
        readings = [actor.__ray_call__.remote(own_memory) for actor in actors]
        return [own_memory(), *ray.get(readings, timeout=240)]

    looks = []
    for number in range(WARM_UP + STEPS):
        handles = remotize(batch, registry, step=number)
        parts = zip(workers, handles.shard(2), strict=True)
        done = ray.get([worker.step.remote(part, number) for worker, part in parts], timeout=240)
        rewards = torch.cat(localize([part["reward"] for part in done], registry))
        assert torch.equal(rewards, batch["ids"].sum(dim=1))
        release([handles, done], registry)
        if WARM_UP <= number < WARM_UP + LOOKS or number >= WARM_UP + STEPS - LOOKS:
            assert backend.stats().held_bytes == 0
            looks.append(memory())
    first, last = (map(min, zip(*some, strict=True)) for some in (looks[:LOOKS], looks[LOOKS:]))
    growth = [after - before for before, after in zip(first, last, strict=True)]
    moved = STEPS * batch.size_bytes
    assert max(growth) < moved // 20, f"driver, workers, stores grew by {growth} of {moved} bytes"
    stats = backend.stats()
    assert stats.shards == 0
    assert stats.put_shards == stats.released_shards > 5 * STEPS
    for worker in workers:
        ray.kill(worker)
