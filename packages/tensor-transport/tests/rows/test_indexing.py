import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycrew.tensor_transport import RTensor, TensorShardInfo
from raycrew.tensor_transport._rows.indexing import (
    check_permutation,
    count_rows,
    even_bounds,
    inverse_permutation,
    normalize_rows,
    padding_of_joined,
    padding_within,
    repeats,
    row_numbers,
    run_bounds,
)


def chosen(index, size):
    return row_numbers(normalize_rows(index, size), size).tolist()


@pytest.mark.parametrize(
    "index",
    [
        [1, -1, 1],
        (1, 4, 1),
        np.array([1, 4, 1]),
        np.array([1, -1, 1], dtype=np.int8),
        torch.tensor([1, 4, 1]),
        torch.tensor([1, -1, 1], dtype=torch.int32),
    ],
)
def test_integers_of_any_kind(index):
    assert chosen(index, 5) == [1, 4, 1]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_masks_of_any_kind(kind):
    assert chosen(kind([True, False, True]), 3) == [0, 2]


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("index", "match"),
    [
        (torch.tensor([1, 0, 1], dtype=torch.uint8), r"may be a mask or row numbers: pass tensor\.bool\(\)"),
        ([True, 0, 2], "by integers or by one boolean per row, not by both"),
        ((0, np.True_), "by integers or by one boolean per row, not by both"),
        (torch.tensor(1), r"not by shape \(\)"),
        (torch.tensor(1, dtype=torch.uint8), r"not by shape \(\)"),
        (torch.tensor([[1]], dtype=torch.uint8), r"not by shape \(1, 1\)"),
        (torch.tensor([1.0]), r"not by torch\.float32"),
        (torch.tensor([1.0]).bfloat16(), r"not by torch\.bfloat16"),
        (torch.tensor([1.0], requires_grad=True), r"not by torch\.float32"),
        (torch.tensor([1], device="meta"), "not by a meta one"),
        (torch.tensor([1, 0]).to_sparse(), "not by a sparse or nested one"),
        ([0, None], "not by object"),
    ],
)
def test_what_may_mean_two_things_names_no_rows(index, match):
    with pytest.raises(TypeError, match=match):
        chosen(index, 3)


def test_truth_values_of_two_kinds_are_one_mask():
    assert chosen([True, np.False_, True], 3) == [0, 2]
    assert chosen(np.array([1, 0], dtype=np.uint8), 3) == [1, 0]


@pytest.mark.parametrize(("index", "advised"), [(1, True), (np.int8(1), True), (1.5, False), ("1", False)])
def test_one_row_is_named_by_a_list_of_one(index, advised):
    with pytest.raises(TypeError, match="not by") as refused:
        normalize_rows(index, 3)
    assert str(refused.value).endswith("; wrap it in a list") == advised


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda rows: np.array(rows, "M8[s]")])
def test_no_rows_at_all(kind):
    assert chosen(kind([]), 3) == []


@given(st.slices(7))
def test_slices_are_those_of_a_list(index):
    assert chosen(index, 7) == list(range(7))[index]


@given(st.integers(-7, 6), st.integers(-7, 6), st.sampled_from([-2, -1, 1, 2]))
def test_ranges_mean_their_members(start, stop, step):
    assert chosen(range(start, stop, step), 7) == [i % 7 for i in range(start, stop, step)]


def test_forward_runs_stay_slices():
    assert normalize_rows(slice(None, -1), 5) == slice(0, 4, 1)
    assert normalize_rows(range(1, 5, 2), 5) == slice(1, 5, 2)
    assert normalize_rows(range(3), 5) == slice(0, 3, 1)
    assert count_rows(normalize_rows(range(1, 5, 2), 5), 5) == 2


@pytest.mark.parametrize(
    "index",
    [
        *([3], [-4], torch.tensor([0, 3])),
        *(range(2, 5), range(1, 4), range(-4, 0), range(4, 1, -1), range(3, 0, -1), range(3, 4)),
    ],
)
def test_a_row_that_does_not_exist(index):
    with pytest.raises(IndexError, match=r"row -?\d is out of range for 3 rows"):
        normalize_rows(index, 3)


@pytest.mark.parametrize("length", [0, 2, 4])
def test_a_mask_of_another_length(length):
    with pytest.raises(IndexError, match=f"a mask of {length} booleans does not fit 3 rows"):
        normalize_rows(np.array([True] * length, dtype=bool), 3)


@pytest.mark.parametrize("index", [1, 1.5, "abc", None, [[0]], [0.5], torch.tensor(1), {0: 1}])
def test_what_is_no_index(index):
    with pytest.raises(TypeError, match="rows are named by"):
        normalize_rows(index, 3)


def test_a_handle_is_no_index():
    mask = RTensor(TensorShardInfo("inline", "m", "", "", "bool", (3,)))
    with pytest.raises(TypeError, match=r"not by RTensor; localize\(\) it first"):
        normalize_rows(mask, 3)


@given(st.permutations(range(9)))
def test_inverse(order):
    rows = check_permutation(order, 9)
    assert rows[inverse_permutation(rows)].tolist() == list(range(9))


@pytest.mark.parametrize("index", [[0, 0, 1], [0, 1], [0, 1, 2, 0], [True, False, True]])
def test_what_is_no_permutation(index):
    with pytest.raises(ValueError, match="not a permutation of 3 rows"):
        check_permutation(index, 3)


@given(st.integers(0, 50), st.integers(1, 20))
def test_even_bounds(size, parts):
    bounds = even_bounds(size, parts)
    lengths = [end - start for start, end in bounds]
    assert [row for start, end in bounds for row in range(start, end)] == list(range(size))
    assert len(bounds) == parts
    assert max(lengths) - min(lengths) <= 1


def test_runs_have_the_sizes_that_are_asked_for_none_included():
    assert run_bounds(5, [2, 0, 3]) == [(0, 2), (2, 2), (2, 5)]
    assert run_bounds(5, 2) == run_bounds(5, np.int64(2)) == [(0, 3), (3, 5)] and run_bounds(0, []) == []
    for sizes in ([2, 2], [6], [6, -1], []):
        with pytest.raises(ValueError, match="do not add up to 5 rows"):
            run_bounds(5, sizes)


@given(st.lists(st.integers(0, 4), max_size=9))
def test_a_row_is_repeated_wherever_it_was_named_before(rows):
    found = repeats(np.array(rows, dtype=np.int64), 5)
    assert found.tolist() == [i for i, row in enumerate(rows) if row in rows[:i]]


def test_a_run_repeats_no_row():
    assert repeats(slice(1, 4, 1), 5).tolist() == []


@pytest.mark.parametrize("padding", [0, 1, 3, 5])
@pytest.mark.parametrize(
    "rows", [slice(None), slice(0, 3), slice(1, 4), slice(4, 5), slice(0, 5, 2), slice(5, 5)]
)
def test_padding_within_a_run_is_what_lies_at_the_end_of_all_rows(rows, padding):
    assert padding_within(rows, 5, padding) == len({*range(5)[rows]} & {*range(5 - padding, 5)})


def test_padding_of_joined_rows_is_known_where_it_comes_last():
    assert padding_of_joined([(4, None), (3, None)]) is None
    assert padding_of_joined([(4, 0), (4, 2)]) == 2
    assert padding_of_joined([(4, 2), (1, 1), (0, None), (0, 0)]) == 3, "no rows do not follow padding"
    assert padding_of_joined([(4, 2), (2, 1)]) is None and padding_of_joined([(4, 2), (2, None)]) is None
