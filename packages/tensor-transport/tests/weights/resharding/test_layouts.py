"""Layouts: what is refused of them, and small sums about memory."""

import pytest

from raycrew.tensor_transport import LayoutError
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
