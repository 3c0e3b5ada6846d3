"""Batches as arguments and results of plain Ray actors."""

import numpy as np
import pytest
import torch
from batches import assert_same, same

from raycrew.tensor_transport import BatchedDataDict

ray = pytest.importorskip("ray")


def double(_, batch):
    batch["x"] *= 2
    batch["log"][0]["t"] += 1
    return batch


def address(_, references):
    """Where the column lies in that process, before anybody copies it."""
    return ray.get(references[0]).borrow("x").data_ptr(), ray.get(references[0]).borrow("x").data_ptr()


def message(_, batch):
    return ray.get(batch["log"][0]["ref"])


@pytest.fixture
def worker(peers):
    return peers[1].actor.run


def batch_of(rows, width):
    return BatchedDataDict(
        {
            "x": torch.randn(rows, width).bfloat16(),
            "log": [{"t": torch.tensor([i]), "text": "hello"} for i in range(rows)],
            "reward": np.arange(rows, dtype=np.float32),
        },
        metadata={"step": 1},
    )


@pytest.mark.parametrize("width", [4, 200_000])
def test_there_and_back(worker, width):
    batch = batch_of(4, width)
    before = batch.select_indices(range(4)).writable()
    before["x"] = before["x"].clone()
    result = ray.get(worker.remote(double, batch), timeout=240)
    assert same(batch["x"], before["x"])
    assert same(result["x"], before["x"] * 2)
    assert same(result["log"][1], batch["log"][1])
    assert result["log"][0]["t"].item() == 1
    assert batch["log"][0]["t"].item() == 0


def test_readers_share_one_copy_until_they_look(worker):
    reference = ray.put(batch_of(4, 200_000))
    first, second = ray.get(worker.remote(address, [reference]), timeout=240)
    assert first == second
    mine, other = ray.get(reference), ray.get(reference)
    assert mine.borrow("x").data_ptr() == other.borrow("x").data_ptr()
    kept = other.borrow("x").clone()
    mine["x"].zero_()
    assert same(other["x"], kept)
    assert_same(ray.get(reference), other)


def test_tensors_never_go_through_the_default_serializer(ray_cluster, monkeypatch):
    def refuse(self, protocol):
        raise AssertionError("a tensor was pickled by torch")

    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", refuse)
    reference = ray.put(batch_of(3, 10))
    assert ray.get(reference)["log"][2]["t"].item() == 2


def test_references_inside_a_column_stay_alive(worker):
    batch = BatchedDataDict(log=[{"ref": ray.put(torch.ones(3).numpy())}])
    future = worker.remote(message, batch)
    del batch
    assert ray.get(future, timeout=240).tolist() == [1, 1, 1]
