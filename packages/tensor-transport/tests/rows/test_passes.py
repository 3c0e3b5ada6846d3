"""Passes over rows: what they are unless told otherwise; arrays that mean more than their elements say."""

import numpy as np
import pytest

from raycrew.tensor_transport._rows.arrays import refuse_special_array
from raycrew.tensor_transport._rows.counts import whole_number
from raycrew.tensor_transport._rows.indexing import padding_of_joined
from raycrew.tensor_transport._rows.passes import Passes


def test_a_pass_takes_all_rows_as_they_stand_unless_told():
    passes = Passes(5, 2)
    assert (passes.shuffle, passes.seed, passes.drop_last) == (False, 0, False)
    with pytest.raises(ValueError, match="seed"):
        Passes(5, 2, seed=-1)
    with pytest.raises(ValueError, match="size is an integer of at least 0"):
        Passes(-1, 2)


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None])
def test_a_whole_number_is_none_below_nothing(value):
    assert (whole_number(0, "n"), whole_number(np.int8(3), "n")) == (0, 3)
    with pytest.raises(ValueError, match="n is an integer of at least 0, not"):
        whole_number(value, "n")


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (np.matrix([[1]]), r"column 'x': .* is a numpy matrix, not a plain array: pass np.asarray\(here\)"),
        (np.ma.array([1]), "a numpy MaskedArray, .*: its mask would be lost; pass value.filled"),
        (np.array([1]).view(type("Unit", (np.ndarray,), {})), "a numpy Unit, not .*: pass a plain array"),
    ],
)
def test_each_special_array_is_refused_with_what_to_do(value, advice):
    with pytest.raises(TypeError, match=advice):
        refuse_special_array(value, "column 'x': it here")


@pytest.mark.parametrize("value", [np.array([1]), [1], None])
def test_plain_arrays_and_other_values_are_not(value):
    refuse_special_array(value, "it")


@pytest.mark.parametrize(
    ("parts", "padding"),
    [
        ([(3, None), (2, None)], None),
        ([(3, 0), (2, 1)], 1),
        ([(3, 0), (2, None)], None),
        ([(3, None), (2, 1)], None),
        ([(3, 1), (0, None)], 1),
        ([(3, 1), (2, 2)], 3),
        ([(3, 1), (2, 1)], None),
        ([(3, 1), (2, None)], None),
        ([(3, 1), (0, 0)], 1),
        ([(2, 2), (2, 2), (2, 1)], None),
    ],
)
def test_rows_are_padding_of_what_is_joined_only_at_its_end(parts, padding):
    assert padding_of_joined(parts) == padding
