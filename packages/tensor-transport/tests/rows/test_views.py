import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raycrew.tensor_transport._rows.indexing import normalize_rows
from raycrew.tensor_transport._rows.views import RowView


def rows_of(view):
    """(shard, row) of each row, the slow way."""
    return [(s, start + i) for s, start, n in view.runs.tolist() for i in range(n)]


@st.composite
def views(draw, sizes=(5, 0, 3, 7)):
    """A view made by a random chain of operations, and the pairs that it has to name."""
    view = RowView.of(sizes)
    pairs = [(s, r) for s, size in enumerate(sizes) for r in range(size)]
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["slice", "select", "repeat", "concat"]))
        if kind == "slice":
            cut = draw(st.slices(len(pairs)))
            view, pairs = view.take(normalize_rows(cut, len(pairs))), pairs[cut]
        elif kind == "select" and pairs:
            index = draw(st.lists(st.integers(-len(pairs), len(pairs) - 1), max_size=20))
            view, pairs = view.take(normalize_rows(index, len(pairs))), [pairs[i] for i in index]
        elif kind == "repeat" and len(pairs) < 50:
            view, pairs = view.repeat(2), [p for p in pairs for _ in range(2)]
        elif kind == "concat" and len(pairs) < 50:
            view, pairs = RowView.concat([view, view]), pairs + pairs
    return view, pairs


@given(views())
def test_operations_name_the_rows_that_a_list_would(case):
    view, pairs = case
    assert len(view) == len(pairs)
    assert rows_of(view) == pairs
    assert rows_of(pickle.loads(pickle.dumps(view))) == pairs


@given(views())
def test_by_shard_puts_every_row_in_its_place(case):
    view, pairs = case
    out = [None] * len(pairs)
    shards = [part.shard for part in view.by_shard()]
    assert shards == sorted(set(shards))
    for part in view.by_shard():
        numbers = np.arange(100)[part.rows]
        assert len(set(numbers.tolist())) == len(numbers), "a row is fetched once"
        if part.repeats is not None:
            numbers = numbers[part.repeats]
        positions = np.arange(len(pairs))[part.positions]
        for position, row in zip(positions.tolist(), numbers.tolist(), strict=True):
            out[position] = (part.shard, row)
    assert out == pairs


@given(views())
def test_used_drops_shards_without_rows(case):
    view, pairs = case
    numbers, renumbered = view.used()
    assert numbers == sorted({s for s, _ in pairs})
    assert [(numbers[s], r) for s, r in rows_of(renumbered)] == pairs


def test_an_unbroken_range_stays_one_run():
    view = RowView.of([1_000_000, 1_000_000])
    part = view.take(slice(10, 1_500_000))
    assert part.runs.tolist() == [[0, 10, 999_990], [1, 0, 500_000]]
    again = view.take(np.arange(10, 1_500_000))
    assert again.runs.tolist() == part.runs.tolist()
