import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycrew.worker_groups import NamedSharding


@pytest.fixture
def cube():
    return NamedSharding([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ["pp", "dp", "tp"])


@pytest.mark.smoke
def test_coordinates_and_ranks(cube):
    assert cube.get_worker_coords(6) == {"pp": 1, "dp": 1, "tp": 0}
    assert cube.get_rank(pp=1, dp=1, tp=0) == 6
    assert cube.get_ranks_by_coord(dp=1) == [2, 3, 6, 7]
    assert cube.get_ranks_by_coord() == list(range(8))
    assert (cube.names, dict(cube.shape), cube.ndim, cube.size) == (
        ["pp", "dp", "tp"],
        {"pp": 2, "dp": 2, "tp": 2},
        3,
        8,
    )
    assert (cube.get_axis_size("tp"), cube.get_axis_index("tp")) == (2, 2)
    assert repr(cube) == "NamedSharding(pp=2, dp=2, tp=2)"
    assert pickle.loads(pickle.dumps(cube)) == cube
    assert list(cube) == list(range(8))
    assert 7 in cube
    assert 8 not in cube


def test_sub_layouts_keep_their_ranks(cube):
    sub = cube.get_ranks(dp=1)
    assert sub == NamedSharding([[2, 3], [6, 7]], ["pp", "tp"])
    assert sub.get_worker_coords(6) == {"pp": 1, "tp": 0}
    assert cube.get_ranks(pp=0, dp=1, tp=1) == 3
    assert cube.get_ranks() == cube


def test_a_part_of_a_layout_has_the_shape_that_is_left():
    layout = [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    part = NamedSharding(layout, ["pp", "dp", "tp"]).get_ranks(pp=1)
    assert (part.layout, dict(part.shape)) == (layout[1], {"dp": 2, "tp": 3})


def test_whatever_has_tolist_is_a_layout():
    class Array:
        def tolist(self):
            return [[0, 1]]

    assert NamedSharding(Array(), ["dp", "tp"]).shape == {"dp": 1, "tp": 2}


@pytest.mark.parametrize(
    ("layout", "names", "message"),
    [
        ([[0, 1], [2]], ["a", "b"], "ragged"),
        ([0, 0], ["a"], "more than once"),
        ([0, 1], ["a", "b"], r"2 name\(s\) for a layout of 1 axes"),
        ([[0], [1]], ["a"], r"1 name\(s\) for a layout of 2 axes"),
        ([True, False], ["a"], "not bool"),
        ([[0], [1]], ["a", "a"], "repeated"),
        ([], ["a"], "empty"),
        (["x"], ["a"], "not str"),
    ],
)
def test_layouts_that_are_none(layout, names, message):
    with pytest.raises(ValueError, match=message):
        NamedSharding(layout, names)


def test_look_ups_say_what_is_wrong(cube):
    for look_up, message in (
        (lambda: cube.get_rank(pp=0, dp=0), r"\['tp'\] are missing"),
        (lambda: cube.get_ranks_by_coord(ep=0), "no axis 'ep'"),
        (lambda: cube.get_ranks(pp=2), "outside 0 to 1"),
        (lambda: cube.get_worker_coords(8), "rank 8 is not in"),
    ):
        with pytest.raises(ValueError, match=message):
            look_up()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms())
def test_ranks_and_coordinates_are_inverse(sizes, random):
    n = 1
    for size in sizes:
        n *= size
    ranks = list(range(n))
    random.shuffle(ranks)
    flat = iter(ranks)

    def fold(rest):
        return [fold(rest[1:]) for _ in range(rest[0])] if rest else next(flat)

    sharding = NamedSharding(fold(sizes), [f"axis{i}" for i in range(len(sizes))])
    assert list(sharding) == ranks
    for rank in ranks:
        coords = sharding.get_worker_coords(rank)
        assert sharding.get_rank(**coords) == sharding.get_ranks(**coords) == rank


def test_layouts_are_equal_by_names_and_places():
    grid = NamedSharding([[0, 1], [2, 3]], ["dp", "tp"])
    assert grid == NamedSharding([[0, 1], [2, 3]], ["dp", "tp"])
    assert hash(grid) == hash(NamedSharding([[0, 1], [2, 3]], ["dp", "tp"]))
    assert grid != NamedSharding([[0, 1], [2, 3]], ["dp", "xp"])
    assert grid != NamedSharding([[0, 2], [1, 3]], ["dp", "tp"])
    assert grid != "NamedSharding(dp=2, tp=2)"


@pytest.mark.parametrize("coordinate", [-1, 2, 3])
def test_coordinates_out_of_range_are_refused(cube, coordinate):
    with pytest.raises(ValueError, match=str(coordinate)):
        cube.get_ranks_by_coord(tp=coordinate)
    with pytest.raises(ValueError, match=str(coordinate)):
        cube.get_rank(pp=0, dp=0, tp=coordinate)
