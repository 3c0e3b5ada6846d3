"""Copies of neighbours as one: the same elements go to the same places."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycrew.tensor_transport.weights.resharding import Region
from raycrew.tensor_transport.weights.resharding._planning.needs import Copy, merged


def moved(copies):
    """From where to where each element goes, and between whom."""
    return sorted(
        (
            *copy[:4],
            copy.source.offset + _at(index, copy.source),
            copy.target.offset + _at(index, copy.target),
        )
        for copy in copies
        for index in itertools.product(*map(range, copy.source.shape))
    )


def _at(index, region):
    return sum(i * step for i, step in zip(index, region.strides, strict=True))


def copy_of(shape, source, target, ranks=(0, 0, 0, 0)):
    (begin, steps), (other, others) = source, target
    return Copy(*ranks, Region(begin, shape, steps), Region(other, shape, others))


STEPS = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
SHAPES = st.tuples(st.integers(1, 2), st.integers(1, 2))
PLACES = st.tuples(st.integers(0, 8), STEPS)
COPIES = st.builds(
    copy_of, SHAPES, PLACES, PLACES, st.sampled_from([(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1)])
)


@given(st.lists(COPIES, max_size=6))
def test_merged_copies_move_the_same(copies):
    assert moved(merged(copies)) == moved(copies)


@given(SHAPES, STEPS, STEPS, st.integers(0, 1), st.data())
def test_a_copy_that_is_cut_is_one_again(shape, steps, others, dim, data):
    longer = tuple(n + 2 if d == dim else n for d, n in enumerate(shape))
    cut = data.draw(st.integers(1, longer[dim] - 1))
    parts = []
    for begin, length in ((0, cut), (cut, longer[dim] - cut)):
        part = tuple(length if d == dim else n for d, n in enumerate(shape))
        parts.append(copy_of(part, (begin * steps[dim], steps), (begin * others[dim], others)))
    (one,) = merged(parts)
    assert moved([one]) == moved(parts)


@given(COPIES, st.integers(0, 3), st.sampled_from([-1, 1]))
def test_copies_between_others_stay_apart(copy, which, by):
    other = (*copy[:which], copy[which] + by, *copy[which + 1 :])
    follows = Copy(*other)._replace(
        source=copy.source._replace(
            offset=copy.source.offset + copy.source.strides[0] * copy.source.shape[0]
        ),
        target=copy.target._replace(
            offset=copy.target.offset + copy.target.strides[0] * copy.target.shape[0]
        ),
    )
    assert len(list(merged([copy, follows]))) == 2


def run(source, target, length=2, ranks=(0, 0, 0, 0)):
    return copy_of((length,), (source, (1,)), (target, (1,)), ranks)


def test_a_copy_continues_the_one_before_it_and_no_earlier_one():
    for other in (run(0, 0), run(8, 2, ranks=(0, 1, 0, 0))):
        assert list(merged([other, run(10, 4), run(12, 6)])) == [other, run(10, 4, 4)]
    assert list(merged([run(0, 0), run(2, 2), run(4, 4), run(9, 6), run(11, 8)])) == [
        run(0, 0, 6),
        run(9, 6, 4),
    ]


@pytest.mark.parametrize("follows", [run(3, 2), run(1, 2), run(2, 3), run(2, 1)])
def test_what_leaves_a_gap_or_comes_again_is_a_copy_of_its_own(follows):
    assert list(merged([run(0, 0), follows])) == [run(0, 0), follows]


@pytest.mark.parametrize("other", [(2, 1), (2, 3)])
def test_rows_of_other_lengths_stay_apart(other):
    steps = (10, 1)
    copies = [copy_of((2, 2), (0, steps), (0, steps)), copy_of(other, (20, steps), (20, steps))]
    assert list(merged(copies)) == copies


@pytest.mark.parametrize(("source", "target"), [((1,), (2,)), ((2,), (1,)), ((2,), (2,))])
def test_steps_of_other_lengths_stay_apart(source, target):
    copies = [run(0, 0), copy_of((2,), (2, source), (2, target))]
    assert list(merged(copies)) == copies == list(merged(copies[:1])) + copies[1:]
    back = [copies[1]._replace(source=Region(0, (2,), source), target=Region(0, (2,), target))]
    back.append(run(2 * source[0], 2 * target[0]))
    assert list(merged(back)) == back
