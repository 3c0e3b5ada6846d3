"""Tensors by handle through a queue of samples: consumers read just their rows, from wherever they are."""

import gc

import pytest
import ray
import torch

from raycrew.tensor_transport import (
    InlineBackend,
    NodeMemoryBackend,
    RayRefBackend,
    RTensor,
    ShardRegistry,
    remotize,
)
from raycrew.worker_groups import SampleQueue

TOKENS = torch.arange(12).view(6, 2)


class Producer:
    """Keeps no handle of what it has put."""

    def put(self, queue, backend):
        registry = ShardRegistry(backend())
        for part in TOKENS.split(3):
            queue.put({"tokens": remotize(part, registry)}, version=0)
        gc.collect()


def test_a_batch_has_one_handle_on_just_its_rows():
    registry = ShardRegistry(InlineBackend())
    with SampleQueue(["tokens"], shuffle_seed=3) as queue:
        for part in TOKENS.split(3):
            queue.put({"tokens": remotize(part, registry)}, version=0)
        batch = queue.get(4)
        handle = batch["tokens"]
        assert isinstance(handle, RTensor) and batch.ids != sorted(batch.ids)
        assert handle.localize().tolist() == TOKENS[batch.ids].tolist()


@pytest.mark.parametrize("backend", [NodeMemoryBackend, pytest.param(RayRefBackend, marks=pytest.mark.long)])
def test_handles_in_a_queue_keep_their_tensors(local_ray, backend):
    with SampleQueue.on_ray(["tokens"]) as queue:
        producer = ray.remote(num_cpus=0)(Producer).remote()
        ray.get(producer.put.remote(queue, backend), timeout=100)
        with queue.get(5) as batch:
            assert batch["tokens"].localize().tolist() == TOKENS[:5].tolist()
        with queue.get(1) as batch:
            assert batch["tokens"].localize().tolist() == TOKENS[5:].tolist()
