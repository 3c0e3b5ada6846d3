"""Plans from random layouts on both sides, acted out on whole arrays."""

import pickle
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resharded import act_out, held_of, numbered, whole_of

from raycrew.tensor_transport.errors import LayoutError, ReshardError
from raycrew.tensor_transport.weights.resharding import (
    Block,
    Layout,
    Memory,
    Region,
    Share,
    Split,
    TensorLayout,
    flat_sharded,
    fused,
    join_layouts,
    on_mesh,
    plan_reshard,
    qkv_parts,
    replicated,
    sharded,
    stacked,
)

DTYPE = "int64"
SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


def random_layout(names, draw):
    """Tensors in groups: alone on meshes, flattened together, or fused where they fit."""
    found = {}
    names = dict(names)
    while names:
        name, shape = next(iter(names.items()))
        alike = [n for n, s in names.items() if s == shape and shape]
        kind = draw.choice(["mesh", "mesh", "flat", "fused", "stacked", "padded"])
        if kind == "flat":
            taken = draw.sample(sorted(names), draw.randint(1, len(names)))
            first = draw.randint(0, 3)
            ranks = range(first, first + draw.randint(1, 5))
            found |= flat_sharded({n: (names[n], DTYPE) for n in taken}, ranks, f"flat {min(taken)}")
        elif kind in ("fused", "stacked") and alike:
            taken = draw.sample(alike, draw.randint(1, len(alike)))
            found |= together(kind, {n: names[n] for n in taken}, draw)
        elif kind == "padded" and shape:
            dim, parts = draw.randrange(len(shape)), draw.randint(1, 4)
            padded = -(-shape[dim] // parts) * parts + parts * draw.randint(0, 2)
            ranks = range(parts * draw.randint(1, 2))
            taken = [name]
            found[name] = sharded(shape, DTYPE, ranks, dim, parts=parts, padded=padded)
        else:
            taken = [name]
            found[name] = alone(shape, draw)
        for n in taken:
            del names[n]
    return Layout(found)


def alone(shape, draw):
    extents = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
    mesh = (np.arange(np.prod(extents)) + draw.randint(0, 2)).reshape(extents).tolist()
    splits = [
        draw.choice([None, Split(draw.randrange(len(shape)), draw.choice([1, 1, 2, 3]))]) if shape else None
        for _ in extents
    ]
    return on_mesh(shape, DTYPE, mesh, splits)


def together(kind, shapes, draw):
    (shape,) = set(shapes.values())
    ranks, dim = range(draw.randint(1, 4)), draw.randrange(len(shape))
    parts = {name: sharded(shape, DTYPE, ranks, dim) for name in shapes}
    if kind == "fused":
        return fused(parts, f"fused {min(shapes)}", draw.randrange(len(shape)))
    return stacked([{name: part} for name, part in parts.items()], f"stacked {min(shapes)}")


@settings(max_examples=300, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=5), st.integers(0, 2**32))
def test_random_layouts_reassemble_exactly(shapes, seed):
    draw = random.Random(seed)
    shapes = {f"t{i}": shape for i, shape in enumerate(shapes)}
    source, target = random_layout(shapes, draw), random_layout(shapes, draw)
    whole = numbered(shapes)
    held = held_of(source, whole)
    plan = plan_reshard(source, target)
    moved, written = act_out(plan, held, target)
    wanted = held_of(target, whole)
    for rank, parameters in wanted.items():
        for parameter, values in parameters.items():
            assert np.array_equal(moved[rank][parameter], values), (rank, parameter)
            assert np.array_equal(written[rank][parameter], (values >= 0).astype(int)), "each element once"
    assert all(np.array_equal(found, whole[name]) for name, found in whole_of(target, moved).items())
    assert plan.size_bytes == sum(move.size_bytes for move in plan.moves()) == sum(plan.bytes_from.values())


@settings(max_examples=50, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=4), st.integers(0, 2**32))
def test_the_same_plan_in_every_process(shapes, seed):
    shapes = {f"t{i}": shape for i, shape in enumerate(shapes)}
    draw = random.Random(seed)
    source, target = random_layout(shapes, draw), random_layout(shapes, draw)
    again = pickle.loads(pickle.dumps((source, target)))
    assert (again[0].digest, again[1].digest) == (source.digest, target.digest)
    first = plan_reshard(source, target)
    assert plan_reshard(*again) is first, "kept by digest"
    other = plan_reshard.__globals__["_cached"].__wrapped__(*again, (), "error", (), ())
    assert list(other.moves()) == list(first.moves())
    turned = [Layout(dict(reversed(layout.tensors.items()))) for layout in again]
    assert [layout.digest for layout in turned] == [source.digest, target.digest]
    other = plan_reshard.__globals__["_cached"].__wrapped__(*turned, (), "error", (), ())
    assert list(other.moves()) == list(first.moves()), "one digest, one plan"


def test_parallel_layouts_hold_what_they_are_known_for():
    whole = np.arange(24).reshape(6, 4)
    column = held_of(Layout({"w": sharded((6, 4), DTYPE, range(2))}), {"w": whole})
    assert column[1]["w"].tolist() == whole[3:].reshape(-1).tolist()
    row = held_of(Layout({"w": sharded((6, 4), DTYPE, range(2), 1)}), {"w": whole})
    assert row[1]["w"].tolist() == whole[:, 2:].reshape(-1).tolist()
    vocabulary = held_of(Layout({"w": sharded((6, 4), DTYPE, range(4), padded=8)}), {"w": whole})
    assert [r["w"].size for r in vocabulary.values()] == [8] * 4
    assert (vocabulary[3]["w"] == -1).all(), "nothing but padding"
    heads = held_of(Layout({"k": sharded((6, 4), DTYPE, range(4), parts=2)}), {"k": whole})
    assert heads[0]["k"].tolist() == heads[1]["k"].tolist() == whole[:3].reshape(-1).tolist()
    uneven = held_of(Layout({"w": sharded((6, 4), DTYPE, range(4))}), {"w": whole})
    assert [r["w"].size for r in uneven.values()] == [8, 8, 8, 0], "as torch.chunk"


def test_fsdp_over_tensor_parallel_is_strided():
    layout = on_mesh((8,), DTYPE, [[0, 1], [2, 3]], [Split(0, 2), Split(0)])
    held = held_of(Layout({"w": layout}), {"w": np.arange(8)})
    assert [held[r]["w"].tolist() for r in range(4)] == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_flat_shards_cut_through_rows():
    whole = numbered({"a": (3, 3), "b": (5,)})
    layout = Layout(flat_sharded({"a": ((3, 3), DTYPE), "b": ((5,), DTYPE)}, range(3), "flat"))
    held = held_of(layout, whole)
    assert [held[r]["flat"].tolist() for r in range(3)] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
        [10, 11, 12, 13, -1],
    ]


QKV = {"q": (8, 4), "k": (4, 4), "v": (4, 4)}


def fused_qkv():
    """Four query heads of two rows, two key heads, over four ranks: each key head is on two of them."""
    parts = {
        "q": sharded((8, 4), DTYPE, range(4)),
        "k": sharded((4, 4), DTYPE, range(4), parts=2),
        "v": sharded((4, 4), DTYPE, range(4), parts=2),
    }
    return Layout(fused(parts, "qkv"))


def test_several_sources_into_parts_of_one_and_back():
    whole = numbered(QKV)
    apart = Layout({name: sharded(shape, DTYPE, range(3)) for name, shape in QKV.items()})
    moved, _ = act_out(plan_reshard(apart, fused_qkv()), held_of(apart, whole), fused_qkv())
    expected = np.concatenate([whole["q"][2:4], whole["k"][:2], whole["v"][:2]])
    assert moved[1]["qkv"].reshape(6, 4).tolist() == expected.tolist()
    back, _ = act_out(plan_reshard(fused_qkv(), apart), moved, apart)
    assert all(np.array_equal(found, whole[name]) for name, found in whole_of(apart, back).items())


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_fused_tensor_is_split_into_named_parts(interleaved):
    whole = numbered({"qkv": (16, 4)})
    rows = qkv_parts("q", "k", "v", heads=4, kv_heads=2, head_size=2, interleaved=interleaved)
    told = qkv_parts("q", "k", "v", heads=4, kv_heads=2, head_size=2)
    assert (rows == told) is not interleaved
    trainer = Layout({"qkv": sharded((16, 4), DTYPE, range(3))}).split("qkv", 0, rows)
    target = fused_qkv()
    moved, _ = act_out(
        plan_reshard(trainer, target),
        held_of(Layout({"qkv": sharded((16, 4), DTYPE, range(3))}), whole),
        target,
    )
    found = whole_of(target, moved)
    for name, ranges in rows.items():
        assert np.array_equal(found[name], np.concatenate([whole["qkv"][a:b] for a, b in ranges])), name


def test_experts_and_gates_on_their_ranks():
    """Expert e is on rank e // 2, gate above up, the experts of a rank in one parameter."""
    shapes = {f"experts.{e}.{part}": (3, 2) for e in range(4) for part in ("gate", "up")}
    groups = [
        fused({f"experts.{e}.{part}": replicated((3, 2), DTYPE, [e // 2]) for part in ("gate", "up")}, "")
        for e in range(4)
    ]
    target = Layout(stacked(groups, "w13"))
    source = Layout({name: sharded(shape, DTYPE, range(3)) for name, shape in shapes.items()})
    whole = numbered(shapes)
    moved, _ = act_out(plan_reshard(source, target), held_of(source, whole), target)
    assert np.array_equal(moved[1]["w13"].reshape(2, 6, 2)[1, 3:], whole["experts.3.up"])


def test_pipeline_stages_and_names():
    stages = [
        Layout({f"model.{i}": sharded((4, 2), DTYPE, [2 * i, 2 * i + 1]) for i in range(2)}),
        Layout({"model.head": replicated((3,), DTYPE, [3])}),
    ]
    source = join_layouts(stages).rename(lambda name: name.replace("model", "generator"))
    shapes = {"generator.0": (4, 2), "generator.1": (4, 2), "generator.head": (3,)}
    target = Layout({name: replicated(shape, DTYPE, [0]) for name, shape in shapes.items()})
    whole = numbered(shapes)
    plan = plan_reshard(source, target)
    assert {m.source_parameter for m in plan.moves()} == {"model.0", "model.1", "model.head"}
    moved, _ = act_out(plan, held_of(source, whole), target)
    assert all(np.array_equal(found, whole[name]) for name, found in whole_of(target, moved).items())


def test_ranks_may_hold_a_tensor_in_parameters_of_their_own_names():
    halves = sharded((4, 2), DTYPE, range(2)).shares
    source = join_layouts(
        Layout({name: TensorLayout((4, 2), DTYPE, (half,))}).rename({name: "w"})
        for name, half in zip(("left", "right"), halves, strict=True)
    )
    assert source.tensors["w"].parameters == ("left", "right")
    target = Layout({"w": replicated((4, 2), DTYPE, [0])})
    plan = plan_reshard(source, target)
    moves = plan.moves()
    assert {(move.source_rank, move.source_parameter) for move in moves} == {(0, "left"), (1, "right")}
    assert [plan.parameters_from(rank) for rank in range(3)] == [{"left"}, {"right"}, set()]


def test_replicas_give_equally_much_and_the_nearest_first():
    source = Layout({f"t{i}": replicated((i + 1,), DTYPE, range(4)) for i in range(40)})
    target = Layout({f"t{i}": replicated((i + 1,), DTYPE, range(3)) for i in range(40)})
    given = plan_reshard(source, target).bytes_from
    assert max(given.values()) - min(given.values()) <= 40 * 8
    nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    plan = plan_reshard(source, target, source_nodes=nodes, target_nodes={0: "a", 1: "b", 2: "c"})
    for move in plan.moves():
        where = nodes[move.source_rank]
        assert move.target_rank == 2 or where == "ab"[move.target_rank]
    assert max(plan.bytes_from.values()) - min(plan.bytes_from.values()) <= 40 * 8


def test_neighbours_are_one_move():
    tensors = {f"t{i}": ((5, 3), DTYPE) for i in range(6)}
    source, target = (
        Layout(flat_sharded(tensors, range(2), "flat")),
        Layout(flat_sharded(tensors, range(3), "flat")),
    )
    moves = list(plan_reshard(source, target).moves())
    assert [m.source.shape for m in moves] == [(30,), (15,), (15,), (30,)], "runs through all tensors"
    column = Layout({"w": sharded((8, 6), DTYPE, range(2))})
    (move, _) = plan_reshard(column, Layout({"w": sharded((8, 6), DTYPE, [0, 1])})).moves()
    assert move.source == move.target == Region(0, (24,), (1,))


def test_what_lies_in_another_order_moves_in_as_few_runs_as_it_has():
    sizes = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 1}
    source, target = (
        Layout(flat_sharded({name: ((sizes[name],), DTYPE) for name in order}, [0], "flat"))
        for order in ("abcde", "acdeb")
    )
    moves = [
        (move.source.offset, move.target.offset, move.source.size)
        for move in plan_reshard(source, target).moves()
    ]
    assert sorted(moves) == [(0, 0, 2), (2, 12, 3), (5, 2, 10)]


def test_a_cast_is_named():
    source = Layout({"layers.0.w": replicated((4,), "bfloat16", [0])})
    target = Layout({"layers.0.w": replicated((4,), "float32", [0])})
    with pytest.raises(ReshardError, match=r"casts=\{'layers.0.w': 'float32'\}") as caught:
        plan_reshard(source, target)
    assert caught.value.tensor == "layers.0.w"
    with pytest.raises(ReshardError, match=r"casts=\{'layers.0.w': 'bfloat16'\}"):
        plan_reshard(target, source)
    (move,) = plan_reshard(source, target, casts={"layers.*": "float32"}).moves()
    assert (move.dtype, move.target_dtype, move.size_bytes) == ("bfloat16", "float32", 8)


@pytest.mark.hostile
def test_a_gap_is_named():
    source = Layout({"w": sharded((6, 2), DTYPE, range(3))})
    held = source.tensors["w"]
    broken = Layout({"w": TensorLayout(held.shape, held.dtype, (held.shares[0], held.shares[2]))})
    with pytest.raises(
        ReshardError, match=r"nobody holds \[2:4, 0:2\] of 'w', which target rank 5"
    ) as caught:
        plan_reshard(broken, Layout({"w": replicated((6, 2), DTYPE, [5])}))
    assert (caught.value.tensor, caught.value.region) == ("w", "[2:4, 0:2]")


def parameter(*blocks, shape=(4, 2), memory=(4, 2), unused=()):
    return Layout({"w": TensorLayout(shape, DTYPE, (Share(0, 0, Memory.dense(memory, unused), blocks),))})


@pytest.mark.hostile
def test_a_parameter_that_is_not_filled_once_is_named():
    source = Layout({"w": replicated((4, 2), DTYPE, [0])})
    top, bottom = Block((0, 0), Region(0, (2, 2), (2, 1))), Block((2, 0), Region(4, (2, 2), (2, 1)))
    assert len(list(plan_reshard(source, parameter(top, bottom)).moves())) == 1
    with pytest.raises(ReshardError, match=r"its element \[2, 0\] gets no value"):
        plan_reshard(source, parameter(top))
    with pytest.raises(ReshardError, match=r"its element \[0, 0\] gets several values"):
        plan_reshard(source, parameter(top, bottom, Block((2, 0), Region(0, (1, 1), (2, 1)))))
    with pytest.raises(ReshardError, match=r"its element \[0, 0\] gets several values"):
        plan_reshard(source, parameter(top, Block((2, 0), Region(0, (2, 2), (2, 1)))))
    with pytest.raises(ReshardError, match="gets several values"):
        plan_reshard(source, parameter(top, bottom, unused=(Region(6, (2,), (1,)),)))
    plan_reshard(source, parameter(top, unused=(Region(4, (4,), (1,)),)))


@pytest.mark.hostile
def test_two_tensors_in_one_place_are_named():
    both = {name: TensorLayout((2,), DTYPE, replicated((2,), DTYPE, [0]).shares, ("p",)) for name in "ab"}
    source = Layout({name: replicated((2,), DTYPE, [0]) for name in "ab"})
    with pytest.raises(ReshardError, match=r"'p' of target rank 0, of shape .2., holds 'a', 'b': .* several"):
        plan_reshard(source, Layout(both))


@pytest.mark.hostile
def test_other_names_shapes_and_dtypes_are_refused():
    one = Layout({"a": replicated((4,), DTYPE, [0]), "b": replicated((4,), DTYPE, [0])})
    with pytest.raises(ReshardError, match=r"no source has 'b'.*rename"):
        plan_reshard(Layout({"a": one.tensors["a"]}), one)
    with pytest.raises(ReshardError, match="no target wants 'b'"):
        plan_reshard(one, Layout({"a": one.tensors["a"]}))
    assert plan_reshard(one, Layout({"a": one.tensors["a"]}), unused="ignore").size_bytes == 32
    with pytest.raises(ReshardError, match=r"'b' has shape \[4\] at the sources and \[2, 2\]"):
        plan_reshard(one, Layout(one.tensors | {"b": replicated((2, 2), DTYPE, [0])}))
    with pytest.raises(ReshardError, match=r"'b' has shape \[2, 2\] at the sources and \[4\]"):
        plan_reshard(Layout(one.tensors | {"b": replicated((2, 2), DTYPE, [0])}), one)


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_different_lengths_are_fused(dim):
    shapes = {"q": (4, 2) if dim == 0 else (2, 4), "k": (2, 2), "v": (2, 2)}
    source = Layout(
        fused({name: replicated(shape, DTYPE, [0]) for name, shape in shapes.items()}, "qkv", dim)
    )
    whole = numbered(shapes)
    (memory,) = held_of(source, whole)[0].values()
    assert (
        memory.reshape((8, 2) if dim == 0 else (2, 8)).tolist()
        == np.concatenate([*whole.values()], dim).tolist()
    )
    assert fused({}, "none") == {}


@pytest.mark.parametrize(("missing", "told"), [(5, "'4'$"), (6, "'4' and 1 more$"), (9, "'4' and 4 more$")])
def test_of_many_names_a_few_are_told_and_the_rest_is_counted(missing, told):
    names = {str(i): replicated((4,), DTYPE, [0]) for i in range(missing)}
    with pytest.raises(ReshardError) as caught:
        plan_reshard(Layout({}), Layout(names))
    listed = str(caught.value).partition("no source has ")[2].partition(";")[0]
    assert re.search(told, listed) and listed.startswith("'0', '1', ")


@pytest.mark.hostile
def test_a_parameter_of_two_shapes_is_named():
    shares = [Share(0, 0, Memory.dense(shape), ()) for shape in ((2,), (3,))]
    target = {
        name: TensorLayout((0,), DTYPE, (share,), ("p",)) for name, share in zip("ab", shares, strict=True)
    }
    source = Layout({name: replicated((0,), DTYPE, [0]) for name in "ab"})
    with pytest.raises(ReshardError, match="'p' of target rank 0 has two shapes"):
        plan_reshard(source, Layout(target))


@pytest.mark.hostile
def test_impossible_layouts_are_refused():
    with pytest.raises(LayoutError, match=r"said to hold \[3:5, 0:2\] of 'w'"):
        parameter(Block((3, 0), Region(0, (2, 2), (2, 1))))
    with pytest.raises(LayoutError, match="does not fit into the memory"):
        parameter(Block((0, 0), Region(6, (2, 2), (2, 1))))
    with pytest.raises(LayoutError, match="does not fit into the memory"):
        parameter(Block((0, 0), Region(-1, (2, 2), (2, 1))))
    with pytest.raises(LayoutError, match="does not fit into the memory"):
        parameter(Block((0, 0), Region(1, (2, 2), (2, -1))))
    for shape in ((2,), (2, 2, 1)):
        with pytest.raises(LayoutError, match="said to hold"):
            parameter(Block((0,) * len(shape), Region(0, shape, (1,) * len(shape))))
    for dim in (-1, 2):
        with pytest.raises(LayoutError, match=f"has no dimension {dim} along which"):
            fused({"a": replicated((2, 3), DTYPE, [0])}, "p", dim)
        with pytest.raises(LayoutError, match="can't be split by"):
            on_mesh((4, 2), DTYPE, [0, 1], [Split(dim)])
    for factor in (0, -1):
        with pytest.raises(LayoutError, match="can't be split by"):
            on_mesh((4, 2), DTYPE, [0, 1], [Split(0, factor)])
    for parts in (0, -2):
        with pytest.raises(LayoutError, match=f"{parts} parts can't be held by 4 ranks"):
            sharded((6,), DTYPE, range(4), parts=parts)
    with pytest.raises(LayoutError, match="can't be padded to 4"):
        sharded((5,), DTYPE, range(4), padded=4)
    with pytest.raises(LayoutError, match="tensors of one flat parameter have one dtype"):
        flat_sharded({"a": ((2,), DTYPE), "b": ((2,), "uint8")}, range(2), "flat")
    for heads, kv_heads in ((4, 0), (4, -2), (3, 2)):
        with pytest.raises(LayoutError, match=f"{heads} query heads can't share {kv_heads} key heads"):
            qkv_parts("q", "k", "v", heads=heads, kv_heads=kv_heads, head_size=2)
    with pytest.raises(LayoutError, match="unknown torch dtype 'float31'"):
        Layout({"w": replicated((2,), "float31", [0])})
    with pytest.raises(LayoutError, match="no dimension 2"):
        sharded((4, 2), DTYPE, range(2), 2)
    with pytest.raises(LayoutError, match="3 parts can't be held by 4 ranks"):
        sharded((6,), DTYPE, range(4), parts=3)
    with pytest.raises(LayoutError, match="can't be padded to 6"):
        sharded((5,), DTYPE, range(4), padded=6)
    for mesh in ([[0, 1], [2]], [0, 0], [], [["a"]]):
        with pytest.raises(LayoutError, match="mesh"):
            on_mesh((4,), DTYPE, mesh, [None])
    with pytest.raises(LayoutError, match="2 splits do not fit a mesh of 1"):
        on_mesh((4,), DTYPE, [0, 1], [None, None])
    with pytest.raises(LayoutError, match="they do not fit each other; let them differ"):
        fused({"a": replicated((2, 3), DTYPE, [0]), "b": replicated((2, 4), DTYPE, [0])}, "ab")
    for shapes, dim in (([(3,), ()], 0), ([(2, 3), (2,)], 1), ([(2, 3, 2), (2, 3)], 2), ([(2,), (2, 0)], 0)):
        parts = {str(i): replicated(shape, DTYPE, [0]) for i, shape in enumerate(shapes)}
        with pytest.raises(LayoutError, match=f"differ in the length of dimension {dim} alone"):
            fused(parts, "p", dim)
    with pytest.raises(LayoutError, match="let them have one shape"):
        stacked([{"a": replicated((3,), DTYPE, [0])}, {"b": replicated((), DTYPE, [0])}], "p")
    with pytest.raises(LayoutError, match=f"have the dtypes {DTYPE}, uint8: a parameter has one"):
        fused({"a": replicated((2, 3), DTYPE, [0]), "b": replicated((2, 3), "uint8", [0])}, "ab")


@pytest.mark.hostile
def test_names_told_of_twice_are_refused():
    layout = Layout({"a": replicated((2,), DTYPE, [0]), "b": replicated((2,), DTYPE, [0])})
    with pytest.raises(LayoutError, match="two tensors would be named 'a'"):
        layout.rename({"b": "a"})
    with pytest.raises(LayoutError, match="does not exist: c"):
        layout.rename({"c": "d"})
    with pytest.raises(LayoutError, match="'a' is told of twice for rank 0"):
        join_layouts([layout, layout])
    with pytest.raises(LayoutError, match=r"'a' is int64\[3\] on one rank and int64\[2\]"):
        join_layouts([layout, Layout({"a": replicated((3,), DTYPE, [1])})])
    for shape, dtype in (((1,), DTYPE), ((3,), DTYPE), ((2,), "bool"), ((2,), "uint8")):
        with pytest.raises(LayoutError, match=r"'a' is .* on one rank and .* on another"):
            join_layouts([layout, Layout({"a": replicated(shape, dtype, [1])})])
    with pytest.raises(LayoutError, match="there is a tensor 'b' already"):
        layout.split("a", 0, {"b": [(0, 2)]})
    for dim, (start, stop) in ((0, (1, 3)), (0, (2, 1)), (0, (-1, 1)), (1, (0, 1)), (-1, (0, 1))):
        with pytest.raises(LayoutError, match=f"no range {start}:{stop} in dimension {dim}"):
            layout.split("a", dim, {"c": [(start, stop)]})
    assert layout.split("a", 0, {"c": [(1, 1)]}).tensors["c"].shape == (0,)
    for name, others in (("a", {"b", "c"}), ("b", {"a", "c"})):
        assert layout.split(name, 0, {"c": [(0, 2)]}).tensors.keys() == others


def test_tensors_without_elements_need_nothing():
    source = Layout({"none": replicated((0, 3), DTYPE, [0]), "one": replicated((), DTYPE, [0])})
    target = Layout({"none": sharded((0, 3), DTYPE, range(2)), "one": replicated((), DTYPE, [1])})
    (move,) = plan_reshard(source, target).moves()
    assert (move.tensor, move.source) == ("one", Region(0, (1,), (1,)))


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 2), (1, 2)), ((2, 2), (3, 1)), ((2, 1), (2, 2)), ((2,), (2,))]
)
def test_what_is_not_contiguous_is_no_part_of_a_fused_parameter(shape, strides):
    block = Block((0,) * len(shape), Region(0, shape, strides))
    part = TensorLayout(shape, DTYPE, (Share(0, 0, Memory(shape, strides), (block,)),))
    with pytest.raises(LayoutError, match=r"'a' can't be a part of 'p': on rank 0 .* not contiguous"):
        fused({"a": part}, "p")


@pytest.mark.hostile
def test_what_lies_in_several_parameters_is_no_part_of_one():
    halves = sharded((4, 2), DTYPE, [0, 1]).shares
    both = tuple(Share(0, i, half.memory, half.blocks) for i, half in enumerate(halves))
    with pytest.raises(LayoutError, match="on rank 0 it lies in several parameters"):
        fused({"a": TensorLayout((4, 2), DTYPE, both, ("left", "right"))}, "p")
    other = [{"a": replicated((2,), DTYPE, [0]), "b": replicated((3,), DTYPE, [0])}]
    with pytest.raises(LayoutError, match="'b' can't be a part of 'p'"):
        stacked(other, "p")
    with pytest.raises(LayoutError, match="a tensor is named twice among the parts of 'p'"):
        stacked([{"a": replicated((2,), DTYPE, [0])}] * 2, "p")


def test_an_empty_shard_has_no_blocks():
    assert [len(share.blocks) for share in sharded((5, 2), DTYPE, range(4)).shares] == [1, 1, 1, 0]
    assert [len(share.blocks) for share in sharded((3, 2), DTYPE, range(4), padded=8).shares] == [1, 1, 0, 0]
    flat = flat_sharded({"a": ((2, 2), DTYPE), "b": ((3,), DTYPE)}, range(3), "flat")
    assert [[len(share.blocks) for share in part.shares] for part in flat.values()] == [[2, 1, 0], [0, 1, 1]]
    assert flat_sharded({}, range(2), "flat") == {}


def test_layouts_are_equal_where_they_say_the_same():
    layouts = [Layout({"a": replicated((2,), DTYPE, [rank])}) for rank in range(4)]
    for i, one in enumerate(layouts):
        assert [one == other for other in layouts] == [i == j for j in range(4)]
        assert one == Layout(dict(one.tensors)) and hash(one) == hash(Layout(dict(one.tensors)))
        assert one != one.tensors
