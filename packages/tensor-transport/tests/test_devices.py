"""Tensors of any device are put, encoded and moved; they arrive on the CPU, where `to` takes them back."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from batches import read_only_copy, same
from processes import ProcessPeer

from raycrew.tensor_transport import (
    BatchedDataDict,
    InlineBackend,
    PackedTensor,
    RaggedTensor,
    RTensor,
    ShardRegistry,
    SharedMemoryBackend,
    TensorArguments,
    WeightPublisher,
    WeightReceiver,
    localize,
    remotize,
)
from raycrew.tensor_transport._bytes.codec import decode, encode
from raycrew.tensor_transport.testing import InProcessByteStore, read_sum
from raycrew.tensor_transport.weights import Bucket, TensorEntry, WeightUpdate
from raycrew.tensor_transport.weights._update import sealed


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def rows(device):
    return torch.arange(300_000, dtype=torch.bfloat16).reshape(1000, 300).to(device)


def odd(device):
    base = rows(device)
    return [base, base.T, base[::3, 5:], base[0, 0], base[:0], base[7].expand(3, 300), base > 3]


def test_put_and_fetch(device):
    shared = SharedMemoryBackend()
    for backend in (InlineBackend(), shared):
        registry = ShardRegistry(backend)
        handles = registry.put(odd(device))
        for got, want in zip(registry.fetch(handles), odd("cpu"), strict=True):
            assert got.device.type == "cpu" and same(got, want.contiguous())
        into = torch.zeros(1000, 300, dtype=torch.bfloat16, device=device)
        (found,) = registry.fetch([handles[0]], into=[into])
        assert found is into and torch.equal(into, rows(device))
        joined = torch.zeros(5, 4, dtype=torch.bfloat16, device=device)
        wanted = RTensor.concat([handles[0], handles[0]])[[3, 1500, 3, 0, 9], 2:6]
        registry.fetch([wanted], into=[joined])
        assert torch.equal(joined, rows(device)[[3, 500, 3, 0, 9], 2:6])
    peer = ProcessPeer(shared)
    assert peer.call(read_sum, shared.put([rows(device).long()])[0]) == int(rows(device).long().sum())
    peer.kill()
    shared.close()


def test_encode_and_decode(device):
    for tensor in odd(device):
        encoded = encode({"deep": [tensor]})
        (found,) = decode(encoded.header, encoded.buffers)["deep"]
        assert found.device.type == "cpu" and same(found, tensor.cpu().contiguous())


def test_what_is_on_a_device_is_never_lent(device):
    tensor = rows(device)
    for encoded in (encode(tensor, borrow=True), BatchedDataDict(x=tensor).encode(borrow=True)):
        assert bool(encoded._lent) == (device == "cpu")
        kept = copy.deepcopy(encoded.buffers)
        if device != "cpu":
            tensor.zero_()
            encoded.check_unchanged()
        assert all(map(np.array_equal, encoded.buffers, kept))
        tensor = rows(device)


def test_remotize_and_arguments(device):
    registry = ShardRegistry(InlineBackend())
    value = {
        "x": rows(device),
        "p": PackedTensor([rows(device), None]),
        "r": RaggedTensor(rows(device), [400, 600]),
    }
    for local in (
        localize(remotize(value, registry), registry),
        TensorArguments(registry=registry).decode(TensorArguments(registry=registry).encode(value)),
    ):
        assert same(local["x"], rows("cpu")) and same(local["p"][0], rows("cpu"))
        assert same(local["r"].values, rows("cpu"))


def test_a_received_batch_moves_to_a_device_and_back(device):
    batch = BatchedDataDict(
        {
            "x": rows("cpu"),
            "ragged": RaggedTensor(rows("cpu"), [1] * 1000),
            "packed": PackedTensor(list(rows("cpu").split(1))),
            "text": [str(i) for i in range(1000)],
        },
        metadata={"step": 1},
    )
    buffers = []
    payload = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    found = pickle.loads(payload, buffers=[read_only_copy(buffer) for buffer in buffers])
    moved = found.to(device, non_blocking=True)
    assert moved is found and found["x"].device.type == found["ragged"].device.type == device
    assert found["packed"].as_tensor().device.type == device
    assert found["ragged"].to_padded(7, length=2).device.type == device
    found["x"] += 1
    picked = BatchedDataDict.from_batches([found.select_indices([-1, 0]), found.slice(3, 5)])
    assert picked["x"].device.type == device and picked.metadata == {"step": 1}
    assert same(picked.to("cpu")["x"], rows("cpu")[[-1, 0, 3, 4]] + 1)
    assert same(found.to_device("cpu")["ragged"], batch["ragged"]) and same(found["packed"], batch["packed"])
    assert same(pickle.loads(pickle.dumps(found.to(device)))["x"], rows("cpu") + 1)


def test_weights_are_published_from_a_device(device):
    store, loaded = InProcessByteStore(), {}
    update = WeightPublisher(store).publish({"w": rows(device), "scale": torch.tensor(2.0, device=device)})
    WeightReceiver(lambda tensors: loaded.update(copy.deepcopy(dict(tensors))), store=store).apply(update)
    assert same(loaded["w"], rows("cpu")) and loaded["scale"] == 2


@pytest.mark.hostile
def test_a_default_device_of_the_caller_is_not_that_of_what_arrives(device):
    registry = ShardRegistry(InlineBackend())
    (handle,) = registry.put([rows("cpu")])
    twice = RTensor.concat([handle, handle])[[3, 1500]]
    store, loaded = InProcessByteStore(), {}
    pieces = [TensorEntry("w", "float32", (1,), i, 0, 4, (i,), (2,)) for i in range(2)]
    none = TensorEntry("none", "float32", (0, 3), 0, 0, 0)
    tickets = [store.put(np.full(1, i, np.float32).view(np.uint8)) for i in range(2)]
    update = sealed(WeightUpdate("p", 1, (*pieces, none), tuple(Bucket(t, 4, None) for t in tickets)))
    receiver = WeightReceiver(lambda tensors: loaded.update(dict(tensors)), store=store)
    with torch.device("meta" if device == "cpu" else device):
        (found,) = registry.fetch([twice])
        receiver.apply(update)
    assert same(found, rows("cpu")[[3, 500]])
    assert same(loaded["w"], torch.arange(2.0)) and loaded["none"].device.type == "cpu"


def test_batches_are_gathered_over_the_groups_own_backend(device, tmp_path):
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        gathered = BatchedDataDict(x=rows(device), text=["a"] * 1000).all_gather()
    finally:
        dist.destroy_process_group()
    assert same(gathered["x"], rows("cpu")) and gathered["text"] == ["a"] * 1000
