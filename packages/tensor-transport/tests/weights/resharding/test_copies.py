"""Copies of neighbours as one: the same elements go to the same places."""

import itertools

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


@given(COPIES, st.integers(0, 3))
def test_copies_between_others_stay_apart(copy, which):
    other = (*copy[:which], copy[which] + 1, *copy[which + 1 :])
    follows = Copy(*other)._replace(
        source=copy.source._replace(
            offset=copy.source.offset + copy.source.strides[0] * copy.source.shape[0]
        ),
        target=copy.target._replace(
            offset=copy.target.offset + copy.target.strides[0] * copy.target.shape[0]
        ),
    )
    assert len(list(merged([copy, follows]))) == 2
