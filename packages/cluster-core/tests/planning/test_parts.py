"""Parts and rooms in numbers: what the search knows of them before it lays anything."""

from functools import reduce
from operator import add

from hypothesis import given
from hypothesis import strategies as st

from raycrew.cluster_core._planning.devices import devices_in, hold, shares_in
from raycrew.cluster_core._planning.searching.rooms import (
    Part,
    Room,
    covers,
    from_each_on,
    number_in,
    positions_by_domain,
    sums,
)
from raycrew.cluster_core._planning.topology import RESOURCE_STEP

AMOUNTS = st.tuples(st.integers(0, 9), st.integers(0, 9))
SHARES = st.integers(1, RESOURCE_STEP) | st.integers(1, 4).map(lambda whole: whole * RESOURCE_STEP)


def total(vectors):
    return reduce(lambda one, other: tuple(map(add, one, other)), vectors, (0, 0))


@given(st.lists(st.tuples(AMOUNTS, st.integers(0, 2)), min_size=1, max_size=6))
def test_from_each_part_on_it_is_known_what_is_needed_together_and_at_least(given_parts):
    parts = [Part(need, 0, logical) for need, logical in sorted(given_parts, key=lambda pair: pair[1])]
    rest, least, of_logical = from_each_on(parts)
    for i, part in enumerate(parts):
        following = [one.need for one in parts[i:]]
        assert rest[i] == total(following)
        assert least[i] == tuple(map(min, *following, following[0]))
        assert of_logical[i] == total(one.need for one in parts[i:] if one.logical == part.logical)
    assert not any(rest[len(parts)])


@given(AMOUNTS, st.lists(AMOUNTS, max_size=5))
def test_so_many_parts_fit_one_after_the_other(free, needs):
    number = number_in(free, [Part(need, 0, 0) for need in needs])
    taken = []
    for need in needs:
        if covers(free, total([*taken, need])):
            taken.append(need)
    assert number == len(taken)


@given(st.lists(st.tuples(st.sampled_from("ab"), AMOUNTS), max_size=6))
def test_amounts_are_summed_by_key_and_rooms_found_by_domain(pairs):
    assert sums(pairs) == {key: total(a for k, a in pairs if k == key) for key, _ in pairs}
    rooms = [Room(amounts, (), key) for key, amounts in pairs]
    assert positions_by_domain(rooms) == {
        key: [i for i, (other, _) in enumerate(pairs) if other == key] for key, _ in pairs
    }


@given(st.integers(0, 5 * RESOURCE_STEP), SHARES)
def test_devices_have_room_for_so_many_shares_and_not_one_more(steps, share):
    number = shares_in(steps, share)
    devices = devices_in(steps)
    if number <= 50:
        assert hold(devices, [share] * number)
        assert not hold(devices, [share] * (number + 1))
