"""Views on known shards: the very runs, slices and positions, at the edges of shards."""

import numpy as np
import pytest

from raycrew.tensor_transport._rows import RowView, check_permutation, even_bounds, is_contiguous, row_numbers
from raycrew.tensor_transport._rows.indexing import count_rows


@pytest.fixture
def view():
    """Shard 0 has rows 0 to 2, shard 1 none, shard 2 has rows 3 and 4."""
    return RowView.of([3, 0, 2])


def ints(*values):
    return np.array(values, dtype=np.int64)


def runs(view):
    return view.runs.tolist()


def wanted(view):
    """What each shard has to give, slices kept apart from arrays."""
    return [
        (part.shard, plain(part.rows), plain(part.positions), plain(part.repeats)) for part in view.by_shard()
    ]


def plain(rows):
    return rows.tolist() if isinstance(rows, np.ndarray) else rows


def test_all_rows(view):
    assert runs(view) == [[0, 0, 3], [2, 0, 2]]
    assert len(view) == 5
    assert wanted(view) == [(0, slice(0, 3), slice(0, 3), None), (2, slice(0, 2), slice(3, 5), None)]


def test_no_rows():
    for empty in (RowView.of([]), RowView.of([0, 0]), RowView.of([2]).take(slice(1, 1))):
        assert len(empty) == 0
        assert empty.by_shard() == []
        assert empty.runs.shape == (0, 3)
        assert empty.used()[0] == []
        assert empty.take(ints()).runs.shape == empty.repeat(2).runs.shape == (0, 3)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(0, 5), [[0, 0, 3], [2, 0, 2]]),
        (slice(0, 3), [[0, 0, 3]]),
        (slice(0, 4), [[0, 0, 3], [2, 0, 1]]),
        (slice(2, 3), [[0, 2, 1]]),
        (slice(2, 4), [[0, 2, 1], [2, 0, 1]]),
        (slice(3, 5), [[2, 0, 2]]),
        (slice(4, 5), [[2, 1, 1]]),
        (slice(1, 2), [[0, 1, 1]]),
        (slice(3, 3), []),
        (slice(5, 5), []),
        (slice(4, 2), []),
        (slice(0, 5, 2), [[0, 0, 1], [0, 2, 1], [2, 1, 1]]),
        (ints(2, 1, 0), [[0, 2, 1], [0, 1, 1], [0, 0, 1]]),
        (ints(0, 1, 3), [[0, 0, 2], [2, 0, 1]]),
        (ints(2, 3), [[0, 2, 1], [2, 0, 1]]),
        (ints(3, 4, 4), [[2, 0, 2], [2, 1, 1]]),
        (ints(0, 0), [[0, 0, 1], [0, 0, 1]]),
        (ints(3, 1), [[2, 0, 1], [0, 1, 1]]),
    ],
)
def test_take(view, rows, expected):
    assert runs(view.take(rows)) == expected
    assert len(view.take(rows)) == sum(n for *_, n in expected)


@pytest.mark.parametrize(
    ("starts", "lengths", "expected"),
    [
        (ints(0, 3, 1), ints(2, 0, 4), [[0, 0, 2], [0, 1, 2], [2, 0, 2]]),
        (ints(0, 2), ints(2, 3), [[0, 0, 3], [2, 0, 2]]),
        (ints(0, 2), ints(2, 1), [[0, 0, 3]]),
        (ints(0, 1), ints(1, 1), [[0, 0, 2]]),
        (ints(3), ints(1), [[2, 0, 1]]),
        (ints(2), ints(1), [[0, 2, 1]]),
        (ints(2), ints(3), [[0, 2, 1], [2, 0, 2]]),
        (ints(4, 0), ints(1, 1), [[2, 1, 1], [0, 0, 1]]),
        (ints(0, 4), ints(1, 1), [[0, 0, 1], [2, 1, 1]]),
        (ints(3, 1), ints(1, 1), [[2, 0, 1], [0, 1, 1]]),
        (ints(0, 2), ints(1, 1), [[0, 0, 1], [0, 2, 1]]),
        (ints(0, 1, 2), ints(1, 1, 1), [[0, 0, 3]]),
        (ints(), ints(), []),
        (ints(5), ints(0), []),
    ],
)
def test_take_ranges(view, starts, lengths, expected):
    assert runs(view.take_ranges(starts, lengths)) == expected


def test_as_few_runs_as_there_can_be():
    view = RowView(ints(0, 0, 1, 0, 1, 2, 0, 3, 3, 0, 7, 1, 1, 8, 1).reshape(-1, 3))
    assert runs(view.merged()) == [[0, 0, 6], [0, 7, 1], [1, 8, 1]]
    assert len(view.merged()) == len(view) == 8


def test_a_part_within_a_part(view):
    assert runs(view.take(slice(1, 5)).take(slice(1, 3))) == [[0, 2, 1], [2, 0, 1]]
    assert runs(view.take(slice(1, 5)).take(ints(3, 0))) == [[2, 1, 1], [0, 1, 1]]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(1, 3), [(0, slice(1, 3), slice(0, 2), None)]),
        (ints(0, 3, 1), [(0, slice(0, 2), [0, 2], None), (2, slice(0, 1), slice(1, 2), None)]),
        (ints(3, 0), [(0, slice(0, 1), slice(1, 2), None), (2, slice(0, 1), slice(0, 1), None)]),
        (ints(2, 0), [(0, [2, 0], slice(0, 2), None)]),
        (ints(2, 0, 2), [(0, [0, 2], slice(0, 3), [1, 0, 1])]),
        (ints(1, 1), [(0, slice(1, 2), slice(0, 2), [0, 0])]),
        (ints(0, 2, 3), [(0, [0, 2], slice(0, 2), None), (2, slice(0, 1), slice(2, 3), None)]),
    ],
)
def test_by_shard(view, rows, expected):
    assert wanted(view.take(rows)) == expected


def test_repeat(view):
    assert wanted(RowView.of([2]).repeat(2)) == [(0, slice(0, 2), slice(0, 4), [0, 0, 1, 1])]
    assert runs(view.repeat(1)) == runs(view)
    assert runs(view.repeat(0)) == []


def test_renumbered_and_used(view):
    assert runs(view.renumbered([5, 0, 7])) == [[5, 0, 3], [7, 0, 2]]
    assert runs(view) == [[0, 0, 3], [2, 0, 2]]
    shards, used = view.take(slice(3, 5)).used()
    assert (shards, runs(used)) == ([2], [[0, 0, 2]])
    shards, used = view.take(ints(4, 0)).used()
    assert (shards, runs(used)) == ([0, 2], [[1, 1, 1], [0, 0, 1]])


def test_concat_keeps_runs_and_order(view):
    joined = RowView.concat([view.take(slice(3, 5)), view.take(slice(0, 1))])
    assert runs(joined) == [[2, 0, 2], [0, 0, 1]]
    assert len(joined) == 3


def test_a_view_is_not_changed_by_what_is_made_of_it(view):
    view.take(slice(1, 4)).runs[:] = 9
    assert runs(view) == [[0, 0, 3], [2, 0, 2]]


@pytest.mark.parametrize(
    ("size", "parts", "expected"),
    [
        (7, 3, [(0, 3), (3, 5), (5, 7)]),
        (6, 3, [(0, 2), (2, 4), (4, 6)]),
        (8, 3, [(0, 3), (3, 6), (6, 8)]),
        (1, 3, [(0, 1), (1, 1), (1, 1)]),
        (0, 2, [(0, 0), (0, 0)]),
        (5, 1, [(0, 5)]),
    ],
)
def test_even_bounds(size, parts, expected):
    assert even_bounds(size, parts) == expected


def test_even_bounds_needs_a_part():
    with pytest.raises(ValueError, match="a number of parts is an integer of at least 1, not 0"):
        even_bounds(3, 0)


def test_rows_written_out_and_counted():
    assert row_numbers(slice(1, 6, 2), 5).tolist() == [1, 3]
    assert row_numbers(ints(3, 1), 5).tolist() == [3, 1]
    assert count_rows(slice(1, 6, 2), 5) == 2
    assert count_rows(ints(3, 1, 1), 5) == 3
    assert is_contiguous(slice(1, 2, 1)) and is_contiguous(slice(1, 2))
    assert not is_contiguous(slice(1, 4, 2)) and not is_contiguous(ints(1, 2))


def test_what_is_wrong_with_a_permutation_is_told():
    with pytest.raises(ValueError, match=r"2 indices, missing \[1, 2\], repeated \[0\]"):
        check_permutation([0, 0], 3)
    with pytest.raises(ValueError, match=r"5 indices, missing \[\], repeated \[0, 1\]"):
        check_permutation([0, 1, 2, 1, 0], 3)
    with pytest.raises(ValueError, match=r"missing \[4, 5, 6\], repeated \[0, 1, 2\] \(first three each\)"):
        check_permutation([0, 0, 1, 1, 2, 2, 3, 3], 8)
    assert check_permutation([-1, 0, 1], 3).tolist() == [2, 0, 1]
    assert check_permutation([], 0).tolist() == []
