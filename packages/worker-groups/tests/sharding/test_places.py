import pytest

from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import NamedSharding
from raycrew.worker_groups.sharding._places import first_seats, moved_seats, resized, with_seats
from raycrew.worker_groups.sharding._ranks import plan_seats


def numbered(plan):
    return [(s.position, s.bundle.index, s.tied_group, s.tied_bundles, s.number_on_node) for s in plan.seats]


def test_ranks_that_stay_keep_their_bundles_and_names_whatever_order_they_came_in():
    plan = plan_seats(FakeCluster([3]).bundles)
    assert numbered(first_seats(plan, [2, 0, 1], 2)) == [(0, 2, 0, (0, [2]), 2), (1, 0, 1, (0, [0]), 0)]


def test_new_seats_are_numbered_after_those_of_their_node_that_stay():
    bundles = FakeCluster([2, 0, 2]).bundles
    plan = first_seats(plan_seats(bundles), [1, 2, 0, 3], 2)
    grown = with_seats(plan, bundles, [bundles[0], bundles[3]])
    assert numbered(grown)[2:] == [(2, 0, 2, (0, [0]), 0), (3, 3, 3, (1, [1]), 1)]
    assert (grown.indices, grown.tied_groups) == ((1, 2, 0, 3), [[0], [1], [2], [3]])


def test_who_moves_keeps_position_and_name_and_is_told_of_the_other_bundle():
    bundles = FakeCluster([2, 2]).bundles
    plan = plan_seats(bundles, [1, 1])
    spare = with_seats(plan, bundles, [bundles[3]]).seats[2]
    moved = moved_seats(plan, {0: spare})
    assert numbered(moved) == [(0, 3, 0, (1, [1]), 0), (1, 2, 1, (1, [0]), 0)]
    assert ([seat.home for seat in moved.seats], moved.indices) == ([0, 1], (3, 2))
    back = moved_seats(moved, {0: plan.seats[0]})
    assert (numbered(back), [seat.home for seat in back.seats]) == (numbered(plan), [0, 1])
    assert moved_seats(moved, {0: spare}).seats[0].home == 0
    grown = with_seats(moved, bundles, [bundles[0], bundles[1]])
    assert [(seat.home, seat.number_on_node) for seat in grown.seats] == [(0, 0), (1, 0), (0, 1), (0, 2)]


def test_one_axis_goes_on_over_more_ranks():
    assert resized(NamedSharding([0, 1], ["dp"]), 3) == NamedSharding([0, 1, 2], ["dp"])


@pytest.mark.parametrize(
    "axes", [NamedSharding([[0, 1]], ["dp", "tp"]), NamedSharding([1, 0], ["dp"])], ids=["two", "reversed"]
)
def test_what_does_not_say_where_a_further_rank_goes_is_refused(axes):
    with pytest.raises(ValueError, match="more than one axis on which ranks 0, 1, 2"):
        resized(axes, 3)
