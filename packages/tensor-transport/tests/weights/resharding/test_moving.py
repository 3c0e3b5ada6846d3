"""Plans carried out within one process: random layouts, strided parameters, deadlines, damage."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lending import LendingTransport
from resharded import held_of, numbered
from test_reshard_plan import SHAPES, random_layout

from raycrew.tensor_transport.errors import (
    DamagedBytesError,
    ReshardError,
    StaleHandleError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.transports import ProcessVmTransport, SharedMemoryTransport, TcpTransport
from raycrew.tensor_transport.weights.resharding import (
    Layout,
    TensorLayout,
    fused,
    join_layouts,
    layout_of,
    offer_shards,
    plan_reshard,
    pull_shards,
    replicated,
    sharded,
)


def states(layout, whole, dtype):
    """rank -> parameter -> tensor of its own shape, as the layout says."""
    shapes = {}
    for name, tensor in layout.tensors.items():
        for share in tensor.shares:
            shapes[share.rank, (tensor.parameters or (name,))[share.parameter]] = share.memory.shape
    return {
        rank: {n: torch.from_numpy(a).to(dtype).reshape(shapes[rank, n]) for n, a in parameters.items()}
        for rank, parameters in held_of(layout, whole).items()
    }


def of_dtype(layout, dtype):
    return Layout(
        {n: TensorLayout(t.shape, dtype, t.shares, t.parameters) for n, t in layout.tensors.items()}
    )


def move(plan, sources, targets, transport, **options):
    checksums = options.pop("checksums", False)
    offers = [
        offer_shards(state, plan, rank, transport, checksums=checksums) for rank, state in sources.items()
    ]
    receipts = [
        pull_shards(state, plan, rank, offers, transport, **options) for rank, state in targets.items()
    ]
    for each in offers:
        transport.withdraw(each.offers)
    assert not transport.held
    return receipts


@pytest.mark.parametrize("maps", [False, True])
@settings(max_examples=60, deadline=None)
@given(
    st.lists(SHAPES, min_size=1, max_size=4),
    st.integers(0, 2**32),
    st.sampled_from(["int64", "bfloat16", "uint8"]),
)
def test_random_layouts_move_exactly(maps, shapes, seed, dtype):
    draw = random.Random(seed)
    shapes = {f"t{i}": shape for i, shape in enumerate(shapes)}
    source, target = (of_dtype(random_layout(shapes, draw), dtype) for _ in range(2))
    whole = {name: array % 251 for name, array in numbered(shapes).items()}
    wanted = states(target, whole, getattr(torch, dtype))
    plan = plan_reshard(source, target)
    transport = LendingTransport(maps)
    targets = {
        rank: {n: torch.full_like(t, -1 if dtype != "uint8" else 255) for n, t in state.items()}
        for rank, state in wanted.items()
    }
    receipts = move(
        plan,
        states(source, whole, getattr(torch, dtype)),
        targets,
        transport,
        bucket_bytes=1024,
        checksums=True,
    )
    for rank, state in wanted.items():
        assert all(torch.equal(targets[rank][name], tensor) for name, tensor in state.items())
    assert sum(r.size_bytes for r in receipts) == plan.size_bytes
    assert maps or transport.pulled_bytes == plan.size_bytes, "nothing is moved twice"


@pytest.mark.parametrize("maps", [False, True])
def test_any_bits_arrive_as_they_are(maps):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float4_e2m1fn_x2):
        weight = bits.view(dtype).reshape(256, -1)
        name = str(dtype).removeprefix("torch.")
        source = join_layouts(layout_of({"w": part}, rank=0) for part in [weight])
        target = Layout({"w": sharded(weight.shape, name, range(2), 1)})
        targets = {r: {"w": torch.empty(256, weight.shape[1] // 2, dtype=dtype)} for r in range(2)}
        move(plan_reshard(source, target), {0: {"w": weight}}, targets, LendingTransport(maps))
        found = torch.cat([targets[r]["w"].view(torch.uint8) for r in range(2)], 1)
        assert torch.equal(found, weight.view(torch.uint8).reshape(256, -1))


@pytest.mark.parametrize("maps", [False, True])
def test_parameters_that_are_turned_or_part_of_something(maps):
    whole = torch.arange(48.0).reshape(6, 8)
    turned = whole.t().contiguous().t()
    base = torch.zeros(6, 20)
    state = {"turned": base[:, 2:10], "straight": torch.zeros(8, 6).t()}
    source = layout_of({"turned": turned, "straight": whole}, rank=0)
    plan = plan_reshard(source, layout_of(state, rank=0))
    move(plan, {0: {"turned": turned, "straight": whole}}, {0: state}, LendingTransport(maps), checksums=True)
    assert torch.equal(state["turned"], whole) and torch.equal(state["straight"], whole)
    assert not base[:, :2].any() and not base[:, 10:].any()


def test_a_named_cast_arrives_cast():
    source = Layout({"w": sharded((5, 4), "bfloat16", range(2))})
    target = Layout({"w": replicated((5, 4), "float32", [0])})
    plan = plan_reshard(source, target, casts={"w": "float32"})
    whole = torch.arange(20).reshape(5, 4).bfloat16()
    state = {"w": torch.zeros(5, 4)}
    sources = {0: {"w": whole[:3]}, 1: {"w": whole[3:]}}
    move(plan, sources, {0: state}, LendingTransport(True))
    assert torch.equal(state["w"], whole.float())
    with pytest.raises(ValueError, match="'w' is cast from bfloat16 to float32"):
        offer_shards(sources[0], plan, 0, LendingTransport(), checksums=True)


def columns(rows=512):
    """A tensor whose columns are wanted where rows are held, and so has to be staged."""
    plan = plan_reshard(
        Layout({"w": sharded((rows, 64), "float32", range(2))}),
        Layout({"w": sharded((rows, 64), "float32", range(2), 1)}),
    )
    whole = torch.randn(rows, 64)
    sources = {r: {"w": whole.chunk(2)[r]} for r in range(2)}
    return plan, whole, sources, {r: {"w": torch.zeros(rows, 32)} for r in range(2)}


def test_memory_is_two_buckets_at_most():
    plan, whole, sources, targets = columns()
    transport = LendingTransport()
    move(plan, sources, targets, transport, bucket_bytes=4096)
    assert torch.equal(torch.cat([targets[r]["w"] for r in range(2)], 1), whole)
    assert transport.largest_bytes <= 4096


@pytest.mark.parametrize("make", [SharedMemoryTransport, ProcessVmTransport, TcpTransport])
@pytest.mark.parametrize("checksums", [False, True])
def test_a_plan_is_carried_out_over_whatever_transport_there_is(make, checksums):
    plan, whole, sources, targets = columns()
    with make() as transport:
        if (reason := transport.available()) is not None:
            pytest.skip(reason)
        offers = [
            offer_shards(state, plan, rank, transport, checksums=checksums) for rank, state in sources.items()
        ]
        for rank, state in targets.items():
            pull_shards(state, plan, rank, offers, transport, bucket_bytes=4096, timeout_s=60)
        assert torch.equal(torch.cat([targets[r]["w"] for r in range(2)], 1), whole)
        for each in offers:
            transport.withdraw(each.offers)
        with pytest.raises(StaleHandleError):
            pull_shards(targets[0], plan, 0, offers, transport, timeout_s=60)


@pytest.mark.hostile
def test_a_deadline_ends_it_and_nothing_is_written_afterwards():
    plan, _, sources, targets = columns()
    transport = LendingTransport()
    offers = [offer_shards(state, plan, rank, transport) for rank, state in sources.items()]
    transport.stalled.clear()
    with pytest.raises(TransportTimeoutError):
        pull_shards(targets[0], plan, 0, offers, transport, timeout_s=0.05, bucket_bytes=4096)
    transport.stalled.set()
    assert not targets[0]["w"].any()


@pytest.mark.hostile
def test_damage_is_named_with_tensor_and_source():
    plan, _, sources, targets = columns()
    transport = LendingTransport()
    transport.damage = True
    with pytest.raises(DamagedBytesError, match="'w' from source rank 0"):
        move(plan, sources, targets, transport, checksums=True)


@pytest.mark.hostile
def test_a_source_that_is_written_to_meanwhile_is_seen():
    plan, _, sources, targets = columns(4096)
    transport = LendingTransport(True)
    offers = [offer_shards(state, plan, rank, transport, checksums=True) for rank, state in sources.items()]
    sources[1]["w"][7, 40] += 1
    pull_shards(targets[0], plan, 0, offers, transport)
    with pytest.raises(DamagedBytesError, match="'w' from source rank 1"):
        pull_shards(targets[1], plan, 1, offers, transport)


@pytest.mark.hostile
@pytest.mark.parametrize("maps", [False, True])
@pytest.mark.parametrize("checksums", [False, True])
def test_names_that_are_one_parameter_of_a_target_get_one_value_or_nothing(maps, checksums):
    values = torch.randn(512, 64)
    values[3, 4] = float("nan")
    state = {"head": values, "embed": values.clone()}
    source = join_layouts([layout_of(state, rank=0)])
    target = Layout({name: sharded((512, 64), "float32", range(2), 1) for name in state})
    plan = plan_reshard(source, target)
    targets = {rank: dict.fromkeys(state, torch.zeros(512, 32)) for rank in range(2)}
    move(plan, {0: state}, targets, LendingTransport(maps), checksums=checksums)
    for rank, held in targets.items():
        assert torch.equal(held["head"].nan_to_num(7), values[:, 32 * rank :][:, :32].nan_to_num(7))
    state["embed"][511, 63] += 1
    move(plan, {0: state}, {0: targets[0]}, LendingTransport(maps), checksums=checksums)
    with pytest.raises(ReshardError, match="'head' and 'embed' are one tensor on rank 1, and differ"):
        move(plan, {0: state}, targets, LendingTransport(maps), checksums=checksums)


@pytest.mark.hostile
@pytest.mark.parametrize("maps", [False, True])
@pytest.mark.parametrize(("shape", "strides"), [((2, 4), (4, 1)), ((1, 8), (3, 1)), ((2, 2, 2), (4, 2, 1))])
def test_one_memory_of_a_target_in_several_shapes_gets_one_value_or_nothing(maps, shape, strides):
    memory = torch.zeros(8)
    target = {"all": memory, "other": memory.as_strided(shape, strides)}
    source = {"all": torch.arange(8.0), "other": torch.arange(8.0).view(shape)}
    plan = plan_reshard(layout_of(source, rank=0), layout_of(target, rank=0))
    move(plan, {0: source}, {0: target}, LendingTransport(maps))
    assert memory.equal(source["all"])
    source["other"] += 1
    with pytest.raises(ReshardError, match="'all' and 'other' are one tensor on rank 0, and differ"):
        move(plan, {0: source}, {0: target}, LendingTransport(maps))


PARTS = {
    "rows": lambda whole: whole[1:3],
    "column": lambda whole: whole[:, 1],
    "bits": lambda whole: whole.view(torch.int32),
}


@pytest.mark.hostile
@pytest.mark.parametrize("maps", [False, True])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize("checksums", [True, False])
def test_parameters_that_have_memory_in_common_get_one_value(maps, part, turn, checksums):
    def state_of(whole):
        return dict([("whole", whole), ("part", PARTS[part](whole))][::turn])

    target, source = state_of(torch.zeros(4, 4)), state_of(torch.arange(16.0).view(4, 4))
    plan = plan_reshard(layout_of(source, rank=0), layout_of(target, rank=0))
    move(plan, {0: source}, {0: target}, LendingTransport(maps), checksums=checksums)
    assert target["whole"].equal(source["whole"])
    source["part"] = source["part"] + 1
    source["part"][..., 0] += 1
    plan = plan_reshard(layout_of(source, rank=0), layout_of(target, rank=0))
    with pytest.raises(ReshardError, match="'part', 'whole' have memory in common on rank 0, and differ"):
        move(plan, {0: source}, {0: target}, LendingTransport(maps), checksums=checksums)


@pytest.mark.hostile
def test_names_that_are_one_parameter_are_compared_as_what_they_are_cast_to():
    state = {"head": torch.ones(4, 4), "embed": torch.ones(4, 4) + 1e-6}
    target = Layout({name: replicated((4, 4), "bfloat16", [0]) for name in state})
    plan = plan_reshard(layout_of(state, rank=0), target, casts=dict.fromkeys(state, "bfloat16"))
    held = torch.zeros(4, 4, dtype=torch.bfloat16)
    move(plan, {0: state}, {0: dict.fromkeys(state, held)}, LendingTransport())
    assert held.eq(1).all()
    state["embed"] += 1
    with pytest.raises(ReshardError, match="one tensor on rank 0"):
        move(plan, {0: state}, {0: dict.fromkeys(state, held)}, LendingTransport())


@pytest.mark.hostile
@pytest.mark.parametrize("maps", [False, True])
def test_withdrawn_offers_are_told(maps):
    plan, _, sources, targets = columns()
    transport = LendingTransport(maps)
    offers = [offer_shards(state, plan, rank, transport) for rank, state in sources.items()]
    transport.withdraw(offers[1].offers)
    with pytest.raises(StaleHandleError):
        pull_shards(targets[0], plan, 0, offers, transport)


@pytest.mark.hostile
def test_whatever_does_not_fit_the_plan_is_refused_before_a_byte_moves():
    plan, _, sources, targets = columns()
    transport = LendingTransport()
    with pytest.raises(ReshardError, match=r"'w' of rank 0 is float64\[256, 64\]"):
        offer_shards({"w": sources[0]["w"].double()}, plan, 0, transport)
    with pytest.raises(ReshardError, match=r"'w' of rank 1 is float32\[255, 64\]"):
        offer_shards({"w": sources[0]["w"][1:]}, plan, 1, transport)
    with pytest.raises(ReshardError, match=r"with strides \[1, 256\]; the layout says .* strides \[64, 1\]"):
        offer_shards({"w": sources[0]["w"].t().contiguous().t()}, plan, 0, transport)
    with pytest.raises(ReshardError, match="rank 0 has no 'w'"):
        offer_shards({}, plan, 0, transport)
    offers = [offer_shards(state, plan, rank, transport) for rank, state in sources.items()]
    with pytest.raises(ReshardError, match="source rank 1 offers no 'w'"):
        pull_shards(targets[0], plan, 0, offers[:1], transport)
    with pytest.raises(ReshardError, match="source rank 0 offers its shards twice"):
        pull_shards(targets[0], plan, 0, offers + offers[:1], transport)
    other, *_ = columns(256)
    with pytest.raises(ReshardError, match="source rank 0 offers its shards for other layouts"):
        pull_shards({"w": torch.zeros(256, 32)}, other, 0, offers, transport)
    assert transport.pulled_bytes == 0 and not np.any(targets[0]["w"].numpy())


@pytest.mark.hostile
def test_shards_of_two_steps_are_not_mixed():
    source, target = (Layout({"w": sharded((4, 4), "float32", range(2), dim)}) for dim in (0, 1))
    plan, transport = plan_reshard(source, target), LendingTransport(maps=False)
    state = {"w": torch.zeros(4, 2)}

    def offers(*versions):
        shard = {"w": torch.ones(2, 4)}
        return [offer_shards(shard, plan, rank, transport, version=v) for rank, v in enumerate(versions)]

    for found, wanted in ((offers(7, 8), None), (offers(7, None), None), (offers(7, 7), 8)):
        with pytest.raises(ReshardError, match=r"offer the versions \{0: 7, 1: .*nothing was moved"):
            pull_shards(state, plan, 0, found, transport, version=wanted)
    assert not state["w"].any()
    for found, wanted in ((offers(7, 7), 7), (offers(8, 8), None), (offers(None, None), None)):
        state["w"].zero_()
        pull_shards(state, plan, 0, found, transport, version=wanted)
        assert state["w"].all()


@pytest.mark.hostile
@pytest.mark.parametrize("wrong", ["source", "target"])
def test_tensors_of_one_parameter_have_its_dtype(wrong):
    apart = Layout({name: replicated((2, 3), "float32", [0]) for name in "ab"})
    together = fused(apart.tensors, "ab")
    mixed = Layout({"a": together["a"], "b": dataclasses.replace(together["b"], dtype="int32")})
    other = Layout(apart.tensors | {"b": replicated((2, 3), "int32", [0])})
    fused_state = {"ab": torch.zeros(4, 3)}
    apart_state = {"a": torch.ones(2, 3), "b": torch.ones(2, 3, dtype=torch.int32)}
    transport = LendingTransport()
    states = (fused_state, apart_state) if wrong == "source" else (apart_state, fused_state)
    plan = plan_reshard(*((mixed, other) if wrong == "source" else (other, mixed)))
    with pytest.raises(ReshardError, match=r"'ab' of rank 0 is float32.*the layout says int32"):
        pull_shards(states[1], plan, 0, [offer_shards(states[0], plan, 0, transport)], transport)
    assert not fused_state["ab"].any()


@pytest.mark.hostile
@pytest.mark.parametrize("maps", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_autograd_knows_what_is_moved_into_parameters(maps, dim):
    source = Layout({"w": replicated((4, 6), "float32", [0])})
    plan = plan_reshard(source, Layout({"w": sharded((4, 6), "float32", range(2), dim)}))
    part = torch.zeros((2, 6) if dim == 0 else (4, 3), requires_grad=True)
    loss = (part**2).sum()
    move(plan, {0: {"w": torch.ones(4, 6)}}, {0: {"w": part}}, LendingTransport(maps=maps))
    assert part.detach().unique().tolist() == [1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
