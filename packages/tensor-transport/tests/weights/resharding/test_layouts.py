"""Layouts: what is refused of them, and small sums about boxes and memory."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycrew.tensor_transport import LayoutError, ReshardError
from raycrew.tensor_transport.weights.resharding import (
    Layout,
    ShardLoader,
    flat_sharded,
    layout_of,
    plan_reshard,
    replicated,
    sharded,
)
from raycrew.tensor_transport.weights.resharding._layouts.boxes import (
    Box,
    Region,
    coalesce,
    contains,
    contiguous_runs,
    covered_once,
    dense_strides,
    flat_boxes,
    intersect,
    subtract,
)
from raycrew.tensor_transport.weights.resharding._layouts.builders import _flatten
from raycrew.tensor_transport.weights.resharding._layouts.layout import _extent


@pytest.mark.parametrize("mesh", [[[0, 1], [2]], [[[0], [1, 2]], [[3], [4, 5]]], [[0, 1], 2]])
def test_a_ragged_mesh_is_refused(mesh):
    with pytest.raises(LayoutError, match="mesh"):
        _flatten(mesh)


@pytest.mark.parametrize("mesh", [[0, 0], ["a"], [[0, 1], [1, 2]], [[]]])
def test_a_mesh_has_different_ranks(mesh):
    with pytest.raises(LayoutError, match="mesh"):
        _flatten(mesh)


def test_a_mesh_is_its_extents_and_its_ranks_in_order():
    assert _flatten([[4, 5, 6], [1, 2, 3]]) == ((2, 3), (4, 5, 6, 1, 2, 3))


def test_memory_reaches_from_the_first_element_to_the_end_of_the_last():
    assert _extent((2, 3), (3, 1)) == 6 and _extent((2, 3), (10, 2)) == 15
    assert _extent((0, 3), (3, 1)) == 0 == _extent((3, 0), (1, 1)) and _extent((), ()) == 1


BOXES = st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3)).map(
    lambda n: Box(n[::2], n[1::2])
)


def elements(box):
    return [*itertools.product(*(range(a, a + n) for a, n in zip(*box, strict=True)))]


@given(BOXES, BOXES)
def test_boxes_have_the_elements_of_both_in_common(a, b):
    common = set(elements(a)) & set(elements(b))
    found = intersect(a, b)
    assert (set() if found is None else set(elements(found))) == common
    assert contains(a, b) == (common == set(elements(b)))
    if found is not None:
        rest = list(subtract(a, found))
        assert sorted(index for box in rest for index in elements(box)) == sorted(set(elements(a)) - common)
        assert all(box.size for box in rest) and len(rest) <= 4


@given(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.data())
def test_a_flat_range_is_a_few_boxes_in_order(shape, data):
    everything = [*itertools.product(*map(range, shape))]
    begin = data.draw(st.integers(0, len(everything)))
    end = data.draw(st.integers(0, len(everything)))
    boxes = [*flat_boxes(shape, begin, end)]
    assert [index for box in boxes for index in elements(box)] == everything[begin:end]
    assert all(box.size for box in boxes) and len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=3))
def test_fewer_dimensions_have_the_same_elements_in_the_same_order(dims):
    region = Region(5, tuple(n for n, _ in dims), tuple(step for _, step in dims))
    shape, strides = coalesce(region.shape, region.strides)
    assert 1 <= len(shape) <= max(1, len(dims))
    starts, length = contiguous_runs(region)
    found = [start + i for start in starts.tolist() for i in range(length)]
    assert found == offsets(region) == offsets(Region(5, shape, strides))


def offsets(region):
    return [
        region.offset + sum(i * step for i, step in zip(index, region.strides, strict=True))
        for index in itertools.product(*map(range, region.shape))
    ]


def test_what_is_contiguous_is_one_run():
    assert coalesce((2, 3, 4), (12, 4, 1)) == ((24,), (1,))
    assert coalesce((2, 3, 4), (24, 4, 1)) == ((2, 12), (24, 1))
    assert coalesce((2, 3), (3, 1), (4, 1)) == ((2, 3), (3, 1), (4, 1)), "in one memory it is not"
    assert coalesce((1, 1), (5, 7)) == coalesce((), ()) == ((1,), (1,))
    assert dense_strides((2, 3, 4)) == (12, 4, 1) and dense_strides(()) == ()


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        ([(0, 8)], None),
        ([(0, 3), (3, 5)], None),
        ([(0, 3), (4, 1), (6, 2)], ("gap", 3)),
        ([(1, 7)], ("gap", 0)),
        ([(0, 7)], ("gap", 7)),
        ([(0, 5), (4, 4)], ("overlap", 4)),
        ([(0, 8), (2, 1), (5, 1)], ("overlap", 2)),
        ([(0, 9)], ("outside", 8)),
        ([(-1, 9)], ("outside", -1)),
        ([(0, 8), (8, 0), (3, 0)], None),
        ([], ("gap", 0)),
    ],
)
def test_the_first_element_that_is_not_named_once_is_told(named, wrong):
    regions = [Region(begin, (length,), (1,)) for begin, length in named]
    assert covered_once(regions, Region(0, (8,), (1,))) == wrong


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=4))
def test_each_element_is_named_once_or_it_is_told_which_is_not(named):
    counts = np.zeros(9, int)
    for begin, length in named:
        counts[begin : begin + length] += 1
    wanted = np.array([1] * 6 + [0] * 3)
    found = covered_once([Region(begin, (length,), (1,)) for begin, length in named], Region(0, (6,), (1,)))
    bad = np.flatnonzero(counts != wanted)
    assert (found is None) == (not len(bad)) and (found is None or found[1] == bad[0])


def test_a_memory_whose_elements_share_a_place_is_not_filled_once():
    assert covered_once([Region(0, (4, 3), (0, 1))], Region(0, (4, 3), (0, 1))) == ("overlap", 0)
    assert covered_once([Region(0, (2, 2), (1, 1))], Region(0, (2, 2), (1, 1))) == ("overlap", 1)
    assert covered_once([Region(0, (1, 3), (0, 1))], Region(0, (1, 3), (0, 1))) is None


@pytest.mark.hostile
@pytest.mark.parametrize("target", [torch.zeros(3).expand(4, 3), torch.zeros(6).as_strided((4, 3), (1, 1))])
def test_a_target_whose_rows_share_memory_is_refused(target):
    source, layout = Layout({"w": replicated((4, 3), "float32", [0])}), layout_of({"w": target}, rank=0)
    with pytest.raises(ReshardError, match="gets several values"):
        plan_reshard(source, layout)
    with pytest.raises(ReshardError, match="gets several values"):
        ShardLoader({"w": target}, layout, 0)
    plan_reshard(layout, source)  # It can be read.


@pytest.mark.hostile
@pytest.mark.parametrize(
    "tensors",
    [
        {"w": sharded((4, 2), "float32", [0, 0])},
        flat_sharded({"w": ((4, 2), "float32"), "b": ((2,), "float32")}, [1, 0, 1], "flat"),
    ],
)
def test_a_rank_that_is_told_of_twice_is_refused(tensors):
    with pytest.raises(LayoutError, match="told of twice for rank"):
        Layout(tensors)


@pytest.mark.hostile
def test_what_becomes_of_unused_tensors_is_one_of_two_words():
    source = Layout({name: replicated((2,), "float32", [0]) for name in "ab"})
    target = Layout({"a": replicated((2,), "float32", [0])})
    with pytest.raises(ValueError, match="unused is 'error' or 'ignore', not 'raise'"):
        plan_reshard(source, target, unused="raise")
    assert plan_reshard(source, target, unused="ignore").size_bytes == 8


@pytest.mark.hostile
@pytest.mark.parametrize("order", [1, -1])
def test_a_cast_is_told_by_any_of_the_patterns_that_a_name_matches(order):
    names = {"norm": ("bfloat16", "float32"), "proj": ("float32", "bfloat16"), "ids": ("int64", "int64")}
    source, target = (
        Layout({name: replicated((2,), dtypes[side], [0]) for name, dtypes in names.items()})
        for side in (0, 1)
    )
    casts = [("*", "bfloat16"), ("*norm*", "float32")][::order]
    moves = {
        move.tensor: (move.dtype, move.target_dtype)
        for move in plan_reshard(source, target, casts=dict(casts)).moves()
    }
    assert moves == names
    with pytest.raises(ReshardError, match="'norm' is bfloat16 at the sources and float32 at the targets"):
        plan_reshard(source, target, casts={"*": "bfloat16"})


def test_a_flat_parameter_that_nobody_holds_is_refused():
    with pytest.raises(LayoutError, match="at least one rank"):
        flat_sharded({"w": ((2, 3), "float32")}, [], "flat")
