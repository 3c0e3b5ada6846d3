"""Which names have some bytes in common, beside what looking at each byte says."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycrew.tensor_transport.weights._update import overlaps_of, twins_of

SHAPE = (4, 5, 6)


@st.composite
def parts(draw):
    """Of one tensor of three dimensions: a box of it, perhaps with its dimensions exchanged."""
    box = []
    for size in SHAPE:
        start = draw(st.integers(0, size - 1))
        box.append(slice(start, draw(st.integers(start + 1, size)), draw(st.sampled_from([1, 1, 2]))))
    return tuple(box), draw(st.sampled_from([(0, 1, 2), (0, 1, 2), (1, 0, 2)]))


@given(st.lists(parts(), min_size=2, max_size=4))
def test_as_many_as_have_an_element_in_common(boxes):
    whole = torch.arange(4 * 5 * 6.0).view(SHAPE)
    found = {f"t{n}": whole[box].permute(order) for n, (box, order) in enumerate(boxes)}
    has, twins = {name: set(t.flatten().tolist()) for name, t in found.items()}, twins_of(found)
    expected = {
        frozenset(pair)
        for pair in combinations(found, 2)
        if has[pair[0]] & has[pair[1]] and not (pair[0] in twins and twins[pair[0]] == twins.get(pair[1]))
    }
    groups = [set(group) for group in overlaps_of(found)]
    assert all(any(pair <= group for group in groups) for pair in expected)
    assert set().union(*groups) == set().union(*expected)


@pytest.mark.parametrize("part", ["column", "expert"])
def test_parts_of_what_is_larger_than_any_memory_are_told_apart_by_their_strides(part):
    whole = torch.empty(1 << 14, 64, 1 << 24, device="meta")
    cut = (lambda n: whole[:, :, n::64][..., :8]) if part == "column" else (lambda n: whole[:, n])
    apart = {str(n): cut(n) for n in range(64)}
    assert overlaps_of(apart) == []
    (group,) = overlaps_of(apart | {"more": cut(7)[1:]})
    assert set(group) == {"7", "more"}


@pytest.mark.parametrize("sizes", [(5, 6), (5, 5), (1, 2)])
@pytest.mark.parametrize("rows", [(), (3,)])
def test_what_was_expanded_is_written_by_nobody(sizes, rows):
    one = torch.zeros(2)[:1]
    found = {str(n): one.expand(*rows, size) for n, size in enumerate(sizes)}
    assert overlaps_of({**found, "base": one}) == []


def test_one_element_is_no_expanded_one_whatever_its_stride():
    both = torch.zeros(2)
    (group,) = overlaps_of({"single": both.as_strided((1,), (0,)), "both": both})
    assert set(group) == {"single", "both"}
