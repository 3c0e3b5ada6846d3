"""Layouts read from DTensors: each rank in turn in one process, with a group that moves nothing."""

import contextlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lending import LendingTransport
from resharded import act_out, held_of, whole_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from raycrew.tensor_transport.errors import LayoutError, UnsupportedTensorError
from raycrew.tensor_transport.weights.resharding import (
    Layout,
    ShardLoader,
    join_layouts,
    layout_of,
    offer_shards,
    plan_reshard,
    pull_shards,
    replicated,
    sharded,
)

MESHES = [
    ((4,), [(Shard(0),), (Shard(1),), (Replicate(),)]),
    (
        (2, 2),
        [
            (Shard(0), Shard(0)),
            (Shard(1), Shard(0)),
            (Replicate(), Shard(1)),
            (_StridedShard(0, split_factor=2), Shard(0)),
        ],
    ),
    (
        (2, 3),
        [
            (_StridedShard(0, split_factor=3), Shard(0)),
            (Shard(0), Replicate()),
            (_StridedShard(1, split_factor=3), Shard(1)),
        ],
    ),
    ((2, 2, 2), [(Shard(0), Shard(0), Shard(1)), (_StridedShard(0, split_factor=4), Shard(0), Shard(0))]),
]
SHAPES = [(8, 6), (7, 5), (1, 3), (12,), (0, 4), (5, 3, 2)]


@contextlib.contextmanager
def as_rank(rank, world):
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def fits(shape, placements):
    """What torch itself can hold so: strided shards have to be even, dimensions there."""
    strided = any(isinstance(p, _StridedShard) for p in placements)
    return all(p.is_replicate() or p.dim < len(shape) for p in placements) and (
        not strided or shape[0] % 8 == 0
    )


def distributed(mesh, cases, wholes):
    """This rank's part of each case."""
    return {
        name: distribute_tensor(wholes[name], mesh, placements, src_data_rank=None)
        for name, (_, placements) in cases.items()
    }


@pytest.mark.parametrize(("extents", "placements"), MESHES)
def test_what_ranks_hold_follows_from_placements(extents, placements):
    world = int(np.prod(extents))
    shapes = [*SHAPES, (48, 48)]
    cases = {f"{s} {p}": (s, p) for s in shapes for p in placements if fits(s, p)}
    wholes = {name: torch.arange(int(np.prod(s))).reshape(s) for name, (s, _) in cases.items()}
    layouts, locals_ = [], []
    for rank in range(world):
        with as_rank(rank, world):
            mesh = init_device_mesh("cpu", extents)
            state = distributed(mesh, cases, wholes)
            layouts.append(layout_of(state))
            locals_.append({name: tensor.to_local().reshape(-1).numpy() for name, tensor in state.items()})
    layout = join_layouts(layouts)
    held = held_of(layout, {name: tensor.numpy() for name, tensor in wholes.items()})
    for rank in range(world):
        for name, local in locals_[rank].items():
            assert np.array_equal(held[rank][name], local), (rank, name)
    target = Layout({n: sharded(s, "int64", range(2), len(s) - 1) for n, (s, _) in cases.items()})
    moved, written = act_out(plan_reshard(layout, target), held, target)
    assert all(np.array_equal(found, wholes[name].numpy()) for name, found in whole_of(target, moved).items())
    assert all((w == 1).all() for parameters in written.values() for w in parameters.values())


@pytest.mark.hostile
def test_autograd_knows_what_is_written_into_a_dtensor():
    layout = Layout({"w": replicated((4, 2), "float32", [0])})
    plan, transport = plan_reshard(layout, layout), LendingTransport()
    offers = offer_shards({"w": torch.ones(4, 2)}, plan, 0, transport)
    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        state = {"w": distribute_tensor(torch.zeros(4, 2), mesh, [Replicate()]).requires_grad_()}
        loader = ShardLoader(state, layout, 0)
        for write in (
            lambda: pull_shards(state, plan, 0, [offers], transport),
            lambda: loader([("w", torch.full((4, 2), 2.0))]),
        ):
            loss = (state["w"] ** 2).sum()
            write()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        assert state["w"].to_local().unique().tolist() == [2]


@pytest.mark.hostile
def test_sums_that_nobody_holds_are_refused():
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        summed = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
        with pytest.raises(LayoutError, match=r"'layers.0' is placed as .*redistribute") as caught:
            layout_of({"layers.0": summed})
        assert caught.value.tensor == "layers.0"


@pytest.mark.hostile
def test_a_part_of_another_size_than_its_placement_says_is_refused():
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        shape, stride = torch.Size((5, 2)), (2, 1)
        padded = DTensor.from_local(
            torch.ones(3, 2), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )
        with pytest.raises(LayoutError, match=r"rank 1 has \[3, 2\] of 'w'.* gives it \[2, 2\]"):
            layout_of({"w": padded})


def test_plain_tensors_lie_as_they_lie():
    base = torch.arange(12).reshape(3, 4)
    layout = layout_of({"turned": base.t(), "column": base[:, 1:3], "none": base[:0]}, rank=7)
    assert layout.ranks == (7,)
    (turned,) = layout.tensors["turned"].shares
    assert (turned.memory.shape, turned.memory.strides) == ((4, 3), (1, 4))
    assert not layout.tensors["none"].shares[0].blocks
    source = Layout({n: replicated(t.shape, "int64", [0]) for n, t in layout.tensors.items()})
    assert plan_reshard(source, layout).size_bytes == (12 + 6) * 8


def test_tied_tensors_are_filled_once():
    weight = torch.ones(4, 2)
    state = {"embed": weight, "head": weight, "part": weight[:2], "flat": weight.view(8)}
    assert list(layout_of(state).tensors) == list(state)
    assert list(layout_of(state, skip_tied=True).tensors) == ["embed", "part"]


@pytest.mark.hostile
def test_what_has_no_plain_bytes_is_refused():
    with pytest.raises(UnsupportedTensorError, match="'s' is a Tensor without plain bytes"):
        layout_of({"s": torch.eye(2).to_sparse()})
    assert layout_of({"meta": torch.empty(2, device="meta")}).tensors["meta"].dtype == "float32"
