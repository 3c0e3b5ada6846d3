"""Weights that are sharded over ranks as DTensors, gathered by a collective: two processes over gloo."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from raycrew.tensor_transport import (
    BatchedDataDict,
    BatchSchemaError,
    SourceChangedError,
    WeightPublisher,
    WeightReceiver,
    gather_weights,
    join_updates,
)
from raycrew.tensor_transport.testing import InProcessByteStore

WORLD = 2


def whole():
    """What the ranks hold together: rows that do not divide evenly, too."""
    random = torch.Generator().manual_seed(3)
    return {
        "rows": torch.randn(5, 6, generator=random),
        "columns": torch.randn(3, 7, generator=random).to(torch.bfloat16),
        "everywhere": torch.arange(4),
        "plain": torch.full((2, 2), 7.0),
        "fewer rows than ranks": torch.randn(1, 3, generator=random),
    }


def sharded(mesh):
    found = whole()
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("fewer rows than ranks", Shard(0))):
        found[name] = distribute_tensor(found[name], mesh, [placement])
    found["everywhere"] = distribute_tensor(found["everywhere"], mesh, [Replicate()])
    found["tied"] = found["rows"]
    return found


def publish_from_rank_zero(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    weights = sharded(mesh)
    assert isinstance(weights["rows"], DTensor) and len(weights["rows"].to_local()) < 5
    if rank:
        for _ in range(2):
            gathered = dict(gather_weights(weights))
            assert torch.equal(gathered["columns"], whole()["columns"])
    else:
        loaded = {}
        store = InProcessByteStore()
        publisher = WeightPublisher(store, bucket_bytes=128)
        receiver = WeightReceiver(lambda tensors: loaded.update(copy.deepcopy(dict(tensors))), store=store)
        for _ in range(2):
            update = publisher.publish(weights)
            receiver.apply(update)
            expected = whole() | {"tied": whole()["rows"]}
            assert loaded.keys() == expected.keys()
            for name, tensor in expected.items():
                assert type(loaded[name]) is torch.Tensor, name
                assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
            places = {entry.name: (entry.bucket, entry.offset) for entry in update.tensors}
            assert places["tied"] == places["rows"], "a tied tensor is sent once"
    with pytest.raises(BatchSchemaError, match="column 'x' is a tensor of class DTensor"):
        BatchedDataDict(x=weights["rows"])
    dist.barrier()
    dist.destroy_process_group()


def test_dtensors_are_gathered_and_published_whole(tmp_path):
    mp.spawn(publish_from_rank_zero, (str(tmp_path),), nprocs=WORLD)


@pytest.fixture
def lone_mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.hostile
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_write_to_a_part_is_seen_though_its_dtensor_was_made_as_it_was_asked_for(lone_mesh, is_sharded):
    held = {f"w{i}": distribute_tensor(torch.ones(4, 4), lone_mesh, [Shard(0)]) for i in range(3)}

    def detached():
        for name, tensor in held.items():
            yield name, tensor.detach()
        held["w1"].to_local().numpy()[0, 0] = 2

    with pytest.raises(SourceChangedError, match="'w1'"):
        WeightPublisher(InProcessByteStore(), sharded=is_sharded).publish(detached())
    with pytest.raises(SourceChangedError, match="'w1'"):
        held["w1"].to_local().zero_()
        list(gather_weights(detached()))


@pytest.mark.parametrize("name", ["uint4", "int4", "float4_e2m1fn_x2", "float8_e4m3fn", "bool"])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_any_dtype_are_put_together(name, dim):
    """Those of dtypes, too, that torch does not copy."""
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    values = torch.arange(24, dtype=torch.uint8).remainder(2).reshape(4, 6)
    store, found, updates = InProcessByteStore(), {}, []
    publishers = [WeightPublisher(store, part=rank, parts=WORLD, sharded=True) for rank in range(WORLD)]
    for rank, publisher in enumerate(publishers):
        dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (WORLD,))
            local = values.chunk(WORLD, dim)[rank].contiguous().view(getattr(torch, name))
            held = {"a": DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)}
            updates.append(publisher.publish(held, version=1))
        finally:
            dist.destroy_process_group()
    WeightReceiver(found.update, store=store).apply(join_updates(updates))
    assert found["a"].dtype == getattr(torch, name)
    assert found["a"].view(torch.uint8).equal(values)
