"""Small packings and plans worked out by hand: bounds, tie-breaks and the order of what is returned."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycrew.tensor_transport.packing import balance, pack
from raycrew.tensor_transport.packing._bins import _exchange
from raycrew.tensor_transport.packing._fitting import _Shelf
from raycrew.tensor_transport.packing._plan import (
    check_batch_size,
    dynamic_shares,
    even_rows,
    packed_shares,
)


@pytest.mark.parametrize(
    ("algorithm", "lengths", "capacity", "bins"),
    [
        ("first_fit", [4, 3, 2, 1], 5, [[0, 3], [1, 2]]),
        ("first_fit", [3, 3, 2], 5, [[0, 2], [1]]),
        ("first_fit", [5, 5], 5, [[0], [1]]),
        ("first_fit", [5] * 5, 5, [[0], [1], [2], [3], [4]]),
        ("first_fit", [0, 5, 0], 5, [[0, 1, 2]]),
        ("best_fit", [3, 2, 4, 1], 5, [[0, 1], [2, 3]]),
        ("best_fit", [3, 4, 1], 5, [[0], [1, 2]]),
        ("best_fit", [0, 0, 5], 5, [[0, 1, 2]]),
        ("first_fit_decreasing", [1, 2, 3, 4], 5, [[0, 3], [1, 2]]),
        ("best_fit_decreasing", [1, 2, 3, 4], 5, [[0, 3], [1, 2]]),
        ("modified_first_fit_decreasing", [1, 2, 3, 4], 5, [[0, 3], [1, 2]]),
        ("modified_first_fit_decreasing", [2, 2, 2], 6, [[0, 1, 2]]),
        ("modified_first_fit_decreasing", [3, 3], 6, [[0, 1]]),
        ("modified_first_fit_decreasing", [6, 1, 1, 1, 1], 10, [[0, 1, 2, 3, 4]]),
        ("modified_first_fit_decreasing", [6, 4, 7, 3], 10, [[2, 3], [0, 1]]),
        ("modified_first_fit_decreasing", [6, 2, 2, 8, 2], 10, [[3, 4], [0, 1, 2]]),
        ("concatenative", [2, 3, 1, 5], 5, [[0, 1], [2], [3]]),
        ("concatenative", [5, 5, 1], 5, [[0], [1], [2]]),
        ("concatenative", [0, 0], 5, [[0, 1]]),
    ],
)
def test_bins(algorithm, lengths, capacity, bins):
    packing = pack(lengths, capacity, algorithm)
    assert packing.bins == bins
    assert packing.loads == [sum(lengths[i] for i in b) for b in bins]
    assert packing.capacity == capacity


def test_what_a_packing_says_of_itself():
    packing = pack([4, 3, 2], 5, "first_fit")
    assert (packing.bins, packing.loads) == ([[0], [1, 2]], [4, 5])
    assert packing.efficiency == 0.9
    assert packing.lower_bound == 2
    assert pack([5, 5], 5).lower_bound == 2
    assert pack([], 5).lower_bound == 0


@pytest.mark.parametrize(
    ("how", "loads"),
    [
        ({"min_bin_count": 1}, [4]),
        ({"min_bin_count": 2}, [1, 3]),
        ({"min_bin_count": 4}, [1, 1, 1, 1]),
        ({"bin_count_multiple": 2}, [1, 3]),
        ({"min_bin_count": 3, "bin_count_multiple": 2}, [1, 1, 1, 1]),
    ],
)
def test_bins_that_are_asked_for(how, loads):
    assert sorted(pack([1, 1, 1, 1], 8, **how).loads) == loads


@pytest.mark.parametrize(
    ("lengths", "capacity", "count", "bins"),
    [
        ([6, 4], 10, 2, [[0], [1]]),
        ([9, 2, 2], 10, 3, [[0], [1], [2]]),
        ([2, 1, 1, 1], 3, 4, [[0], [1], [2], [3]]),
        ([0, 0], 5, 2, [[0], [1]]),
        ([0, 0, 0, 0], 5, 2, [[0, 2], [1, 3]]),
        ([5, 5], 5, 2, [[0], [1]]),
    ],
)
def test_bins_that_are_asked_for_are_never_empty_and_lose_nothing(lengths, capacity, count, bins):
    assert sorted(pack(lengths, capacity, min_bin_count=count).bins) == bins


@pytest.mark.parametrize(
    ("lengths", "capacity", "count", "loads"),
    [
        ([2, 1, 1, 1], 3, 3, [1, 2, 2]),
        ([6] * 5 + [3, 1, 1, 1], 6, 7, [3, 3, 6, 6, 6, 6, 6]),
        ([3] * 8 + [1] * 3, 3, 10, [1, 2, *[3] * 8]),
        ([6] * 8 + [2, 2, 1, 1, 1, 1], 6, 12, [1, 2, 2, 3, *[6] * 8]),
    ],
)
def test_the_heaviest_bins_are_split_evenly_and_none_becomes_fuller(lengths, capacity, count, loads):
    assert sorted(pack(lengths, capacity, min_bin_count=count).loads) == loads


@pytest.mark.parametrize("algorithm", ["first_fit", "modified_first_fit_decreasing"])
def test_more_bins_than_are_needed_are_all_filled_a_little_less(algorithm):
    lengths = np.random.default_rng(0).integers(1, 500, 400)
    packing = pack(lengths, 4096, algorithm, min_bin_count=40)
    assert len(packing.bins) == 40
    assert max(packing.loads) < 1.05 * sum(lengths) / 40


def test_nothing_wastes_nothing():
    assert pack([], 5).efficiency == 1.0 and pack([5, 5], 5).efficiency == 1.0


def test_capacities():
    assert pack([2**31 - 1], 2**31 - 1).bins == [[0]]
    for capacity in (0, -1, 2**31):
        with pytest.raises(ValueError, match="positive and at most"):
            pack([1], capacity)
    with pytest.raises(ValueError, match="sequence 1 of 18446744073709551615 tokens does not fit"):
        pack(np.array([1, 2**64 - 1], np.uint64), 8)


@pytest.mark.parametrize(
    ("loads", "ranks", "dealt"),
    [
        ([5, 1, 4, 2], 2, [[0, 1], [2, 3]]),
        ([1, 1, 1, 1], 2, [[0, 2], [1, 3]]),
        ([3, 3, 3], 1, [[0, 1, 2]]),
        ([1, 2, 3], 3, [[2], [1], [0]]),
        ([], 2, [[], []]),
        ([], 1, [[]]),
        ([4, 4, 4, 4], 2, [[0, 2], [1, 3]]),
    ],
)
def test_balance(loads, ranks, dealt):
    assert balance(loads, ranks) == dealt


def test_an_exchange_brings_the_ranks_closer():
    loads = [9, 7, 7, 6, 3, 2]  # Dealt in rounds: 9 + 6 + 3 or 2, and 7 + 7 + the other.
    totals = sorted(sum(loads[b] for b in rank) for rank in balance(loads, 2))
    assert totals == [17, 17]
    assert all(
        [loads[b] for b in rank] == sorted((loads[b] for b in rank), reverse=True)
        for rank in balance(loads, 2)
    )


@pytest.mark.parametrize(
    ("dealt", "loads"),
    [
        ([[0, 1], [2, 3]], [10, 4, 6, 1]),
        ([[0, 1], [2, 3]], [9, 8, 7, 2]),
        ([[0, 1, 2], [3, 4, 5]], [5, 5, 5, 4, 4, 4]),
        ([[0, 1, 2], [3, 4, 5]], [9, 9, 9, 8, 6, 1]),
    ],
)
def test_the_exchange_that_brings_two_ranks_closest_is_made(dealt, loads):
    before = [sum(loads[b] for b in one) for one in dealt]
    pairs = [(a, b) for a in dealt[0] for b in dealt[1]]
    best = min(abs(before[0] - before[1] - 2 * (loads[a] - loads[b])) for a, b in pairs)
    totals = list(before)
    assert _exchange(dealt, totals, loads)
    assert totals == [sum(loads[b] for b in one) for one in dealt]
    assert abs(totals[0] - totals[1]) == best


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 2**32))
def test_no_exchange_of_two_bins_helps_any_more(loads, ranks, seed):
    loads = np.random.default_rng(seed).permutation(loads * ranks).tolist()
    dealt = balance(loads, ranks)
    assert all(rank == sorted(rank, key=lambda b: -loads[b]) for rank in dealt), "heaviest first"
    totals = [sum(loads[b] for b in rank) for rank in dealt]
    heavy, light = totals.index(max(totals)), totals.index(min(totals))
    gap = totals[heavy] - totals[light]
    assert all(abs(gap - 2 * (loads[a] - loads[b])) >= gap for a in dealt[heavy] for b in dealt[light])


def test_a_shelf_finds_the_nearest_key():
    shelf = _Shelf([(3, [30, 31]), (7, [70])])
    assert shelf.pop_at_least(4) == (7, 70)
    assert shelf.pop_at_least(4) is None
    assert shelf.pop_at_most(2) is None
    assert shelf.pop_at_least(3) == (3, 30)
    assert shelf.pop_at_most(3) == (3, 31)
    assert shelf.keys == []
    shelf.push(5, 50)
    shelf.push(5, 51)
    assert list(shelf.runs()) == [(5, [51, 50])]
    assert shelf.pop_smallest_if_two_fit(9) is None
    assert shelf.pop_smallest_if_two_fit(10) == (5, 51)
    assert shelf.pop_smallest_if_two_fit(10) is None
    shelf.push(6, 60)
    assert shelf.pop_smallest_if_two_fit(11) == (5, 50)
    for key in (0, 1, 9):
        assert _Shelf([(key, [3])]).pop_smallest_if_two_fit(9) is None, "there is one"


def plan(lengths, shards, batch_size, longest=None, **args):
    found = dynamic_shares(np.array(lengths, np.int64), shards, batch_size, args, longest)
    return [(share.rows.tolist(), share.bounds, share.lengths, share.counts) for share in found]


@pytest.mark.parametrize(
    ("budget", "bounds", "padded"),
    [
        (8, [[0, 2], [2, 4]], [2, 4]),
        (7, [[0, 2], [2, 3], [3, 4]], [2, 4, 4]),
        (16, [[0, 4]], [4]),
        (15, [[0, 3], [3, 4]], [4, 4]),
    ],
)
def test_a_microbatch_is_full_at_its_budget(budget, bounds, padded):
    (found,) = plan([2, 2, 4, 4], 1, 4, max_tokens_per_microbatch=budget)
    assert found == ([0, 1, 2, 3], [bounds], [padded], [4])


def test_rows_are_dealt_like_cards_and_ties_keep_their_order():
    first, second = plan([3, 1, 3, 1], 2, 4, max_tokens_per_microbatch=3)
    assert first == ([1, 0], [[[0, 1], [1, 2]]], [[1, 3]], [2])
    assert second[0] == [3, 2]


def test_global_batches_are_planned_one_by_one():
    (found,) = plan([2, 1, 4, 3], 1, 2, max_tokens_per_microbatch=8)
    assert found == ([1, 0, 3, 2], [[[0, 2]], [[0, 2]]], [[2], [4]], [2, 2])


def test_global_batches_of_one_row_each_are_planned_and_none_is_nothing():
    (found,) = plan([2, 1, 3], 1, 1, max_tokens_per_microbatch=8)
    assert found == ([0, 1, 2], [[[0, 1]]] * 3, [[2], [1], [3]], [1, 1, 1])
    assert plan([], 1, 0, max_tokens_per_microbatch=8) == [([], [], [], [])]
    (packed,) = packed_shares(np.array([2, 1, 3], np.int64), 1, 1, {"max_tokens_per_microbatch": 5})
    assert (packed.rows.tolist(), packed.bounds, packed.lengths) == (
        [0, 1, 2],
        [[[0, 1]]] * 3,
        [[2], [1], [3]],
    )
    (empty,) = packed_shares(np.zeros(0, np.int64), 1, 0, {"max_tokens_per_microbatch": 5})
    assert empty.rows.tolist() == [] == empty.bounds


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "1", None])
def test_a_budget_is_a_positive_integer(wrong):
    with pytest.raises(ValueError, match="max_tokens_per_microbatch is a positive integer, not"):
        plan([0], 1, 1, max_tokens_per_microbatch=wrong)
    assert plan([1], 1, 1, max_tokens_per_microbatch=np.int8(1))[0][2] == [[1]]


@pytest.mark.parametrize("shards", [0, -1])
def test_there_is_at_least_one_shard(shards):
    with pytest.raises(ValueError, match="at least one shard"):
        check_batch_size(6, shards, None, divide=True)


def test_rows_without_tokens_take_no_room():
    (found,) = plan([0, 0, 0], 1, 3, max_tokens_per_microbatch=1)
    assert found == ([0, 1, 2], [[[0, 3]]], [[0]], [3])


def test_padded_lengths_are_rounded_but_never_beyond_the_rows():
    how = {"max_tokens_per_microbatch": 6, "sequence_length_round": 3}
    assert plan([2, 4], 1, 2, **how)[0][2] == [[3, 6]]
    assert plan([2, 4], 1, 2, longest=4, **how)[0][2] == [[3, 4]]
    with pytest.raises(
        ValueError, match="a row of 9 tokens, rounded up, is over max_tokens_per_microbatch=6"
    ):
        plan([7], 1, 1, **how)


def test_packed_shares():
    args = {"max_tokens_per_microbatch": 5, "input_lengths_key": "n"}
    shares = packed_shares(np.array([5, 1, 4, 2, 3, 5], np.int64), 2, 6, args)
    assert [share.counts for share in shares] == [[3], [3]]
    assert [share.lengths for share in shares] == [[[5, 5]], [[5, 5]]]
    assert sorted(row for share in shares for row in share.rows.tolist()) == [0, 1, 2, 3, 4, 5]
    padded = packed_shares(np.array([1, 2], np.int64), 1, 2, args | {"sequence_length_pad_multiple": 2})
    assert padded[0].lengths == [[4]]


@pytest.mark.parametrize(
    ("arguments", "divide", "expected"),
    [
        ((5, 1, 1), True, 1),
        ((1, 1, 1), True, 1),
        ((6, 2, None), True, 6),
        ((6, 2, 2), True, 2),
        ((6, 4, 3), False, 3),
        ((0, 3, None), True, 0),
    ],
)
def test_batch_sizes(arguments, divide, expected):
    assert check_batch_size(*arguments, divide=divide) == expected


@pytest.mark.parametrize("batch_size", [-1, 0, 4, 7])
def test_batch_sizes_that_cannot_be(batch_size):
    with pytest.raises(ValueError, match=f"6 rows are not a multiple of batch_size {batch_size}"):
        check_batch_size(6, 1, batch_size, divide=False)


def test_even_rows():
    assert even_rows(5, 2, 5) == [slice(0, 3, 1), slice(3, 5, 1)]
    assert [rows.tolist() for rows in even_rows(6, 2, 3)] == [[0, 1, 3, 4], [2, 5]]
