"""Whole tensors, as updates bring them, into the parts that a rank holds."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resharded import numbered
from test_moving import of_dtype, states
from test_reshard_plan import SHAPES, random_layout

from raycrew.tensor_transport import ReshardError, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.errors import ManifestMismatchError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights.resharding import Layout, ShardLoader, layout_of, replicated, sharded


@settings(max_examples=60, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=4), st.integers(0, 2**32))
def test_each_rank_of_a_random_layout_gets_exactly_its_parts(shapes, seed):
    shapes = {f"t{i}": shape for i, shape in enumerate(shapes)}
    layout = of_dtype(random_layout(shapes, random.Random(seed)), "int64")
    whole = numbered(shapes)
    for rank, wanted in states(layout, whole, torch.int64).items():
        held = {name: torch.full_like(tensor, -1) for name, tensor in wanted.items()}
        loader = ShardLoader(held, layout, rank)
        loader((name, torch.from_numpy(array)) for name, array in whole.items())
        assert {n: tuple(t.shape) for n, t in loader.expected.items()} == shapes
        assert all(torch.equal(held[name], tensor) for name, tensor in wanted.items())


def test_updates_of_shards_reach_tensor_parallel_ranks_and_nothing_else_does():
    whole = {"up": torch.arange(24.0).reshape(6, 4), "norm": torch.ones(4)}
    layout = Layout(
        {"up": sharded((6, 4), "float32", range(2), 1), "norm": replicated((4,), "float32", [0, 1])}
    )
    store = InProcessByteStore()
    publisher = WeightPublisher(store, keep=4)
    update = publisher.publish(whole)
    for rank in range(2):
        held = {"up": torch.zeros(6, 2), "norm": torch.zeros(4)}
        loader = ShardLoader(held, layout, rank)
        receiver = WeightReceiver(loader, expected=loader.expected, store=store)
        receiver.apply(update)
        assert torch.equal(held["up"], whole["up"][:, 2 * rank : 2 * rank + 2])
        assert torch.equal(held["norm"], whole["norm"])
        with pytest.raises(ManifestMismatchError, match="receiver has float32"):
            receiver.apply(publisher.publish(whole | {"up": whole["up"].double()}))
        with pytest.raises(ReshardError, match="its layout has none"):
            loader([("down", torch.ones(2))])


def test_a_parameter_with_a_gap_is_refused_before_anything_is_fetched():
    padded = Layout({"w": sharded((5, 2), "float32", range(2), padded=8)})
    ShardLoader({"w": torch.zeros(4, 2)}, padded, 1)
    with pytest.raises(ReshardError, match="the layout says"):
        ShardLoader({"w": torch.zeros(3, 2)}, padded, 1)


@pytest.mark.hostile
def test_names_that_are_one_parameter_of_a_rank_get_one_value_or_nothing():
    store, state = InProcessByteStore(), {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}
    state["tied"] = state["a"]
    layout = Layout({name: sharded((4, 3), "float32", range(2)) for name in state})
    loader = ShardLoader(state, layout, 1)
    receiver = WeightReceiver(loader, expected=loader.expected, store=store)
    publisher = WeightPublisher(store)
    whole = {name: torch.full((4, 3), float(value)) for value, name in enumerate(state, 1)}
    with pytest.raises(ManifestMismatchError, match="'a' and 'tied' are one tensor here"):
        receiver.apply(publisher.publish(whole))
    assert not state["a"].any()
    receiver.apply(publisher.publish(whole | {"tied": whole["a"].clone()}))
    assert state["a"].eq(1).all() and state["b"].eq(2).all()


def test_what_a_partial_update_does_not_bring_counts_as_no_write():
    layout = Layout({name: replicated((2, 2), "float32", [0]) for name in ("a", "b")})
    state = {name: torch.ones(2, 2, requires_grad=True) for name in ("a", "b")}
    loader, loss = ShardLoader(state, layout, 0), (state["a"] ** 2).sum()
    loader([("b", torch.zeros(2, 2))])
    loss.backward()
    assert state["a"].grad is not None and not state["b"].any()


@pytest.mark.hostile
def test_one_memory_of_a_rank_in_several_shapes_gets_one_value_or_nothing():
    store, memory = InProcessByteStore(), torch.zeros(8)
    state = {"all": memory, "rows": memory.view(2, 4)}
    loader = ShardLoader(state, layout_of(state, rank=0), 0)
    receiver = WeightReceiver(loader, expected=loader.expected, store=store)
    publisher = WeightPublisher(store)
    with pytest.raises(ManifestMismatchError, match="'all' and 'rows' are one tensor here"):
        receiver.apply(publisher.publish({"all": torch.ones(8), "rows": torch.zeros(2, 4)}))
    assert not memory.any()
    receiver.apply(publisher.publish({"all": torch.ones(8), "rows": torch.ones(2, 4)}))
    assert memory.eq(1).all()


@pytest.mark.hostile
def test_a_lazy_conjugate_of_a_parameter_is_another_tensor():
    store, memory = InProcessByteStore(), torch.zeros(4, dtype=torch.complex64)
    state = {"w": memory, "conjugate": memory.conj()}
    loader = ShardLoader(state, layout_of(state, rank=0), 0)
    receiver = WeightReceiver(loader, expected=loader.expected, store=store)
    values = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    receiver.apply(WeightPublisher(store).publish({"w": values, "conjugate": values.conj().resolve_conj()}))
    assert memory.equal(values)


@pytest.mark.hostile
@pytest.mark.parametrize("part", [lambda whole: whole[:4], lambda whole: whole.view(torch.int32)])
@pytest.mark.parametrize("turn", [1, -1])
def test_parameters_that_have_memory_in_common_get_one_value(part, turn):
    memory = torch.zeros(8)
    state = dict([("all", memory), ("part", part(memory))][::turn])
    loader = ShardLoader(state, layout_of(state, rank=0), 0)
    values = torch.arange(8.0)
    loader([("all", values), ("part", part(values))])
    loader([("part", part(values))])
    assert memory.equal(values)
    for came in ([("all", values + 1), ("part", part(values))], [("all", values + 2)]):
        with pytest.raises(ReshardError, match="'all', 'part' have memory in common on rank 0"):
            loader(came)
