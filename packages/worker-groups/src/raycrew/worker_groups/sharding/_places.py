"""Groups that get fewer or more places: the ranks of those that stay never change; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from raycrew.cluster_core import Bundle
from raycrew.worker_groups.sharding._named import NamedSharding
from raycrew.worker_groups.sharding._ranks import Seat, SeatPlan


def first_seats(plan: SeatPlan, order: Sequence[int], n: int) -> SeatPlan:
    """The first `n` ranks alone, each at the position that is its rank.

    Args:
        plan: All seats; none is tied to another.
        order: Positions in rank order.
        n: How many stay.
    """
    chosen = (plan.seats[position] for position in order[:n])
    seats = tuple(replace(seat, position=rank, tied_group=rank) for rank, seat in enumerate(chosen))
    return replace(plan, seats=seats, indices=tuple(seat.bundle.index for seat in seats))


def with_seats(plan: SeatPlan, bundles: Sequence[Bundle], chosen: Sequence[Bundle]) -> SeatPlan:
    """A plan with further seats at its end.

    Args:
        plan: The seats so far; none is tied to another.
        bundles: All bundles of the cluster, in its order.
        chosen: Those of the new seats.
    """
    nodes: dict[int, list[int]] = {}
    for bundle in bundles:
        nodes.setdefault(bundle.node_index, []).append(bundle.index)
    numbers = {node: number for number, node in enumerate(nodes)}
    seats = list(plan.seats)
    for bundle in chosen:
        node, position = bundle.node_index, len(seats)
        told = numbers[node], [nodes[node].index(bundle.index)]
        taken = {seat.number_on_node for seat in seats if seat.home == node}
        number = next(i for i in range(len(seats) + 1) if i not in taken)
        seats.append(Seat(position, bundle, position, 0, told, number))
    return replace(plan, seats=tuple(seats), indices=tuple(seat.bundle.index for seat in seats))


def moved_seats(plan: SeatPlan, elsewhere: Mapping[int, Seat]) -> SeatPlan:
    """A plan in which the workers of some positions sit elsewhere, and keep their names.

    Args:
        plan: The seats so far.
        elsewhere: By position, a seat on the other bundle.
    """
    seats = list(plan.seats)
    for position, seat in elsewhere.items():
        old = seats[position]
        seats[position] = replace(
            old, bundle=seat.bundle, tied_bundles=seat.tied_bundles, named_node=old.home
        )
    return replace(plan, seats=tuple(seats), indices=tuple(seat.bundle.index for seat in seats))


def resized(sharding: NamedSharding, n: int) -> NamedSharding:
    """The same one axis over `n` ranks.

    Raises:
        ValueError: There are several axes, or ranks are in an order of their own along the one.
    """
    if sharding.ndim != 1 or list(sharding) != list(range(sharding.size)):
        raise ValueError(f"{sharding!r} is more than one axis on which ranks 0, 1, 2, … follow each other")
    return NamedSharding(range(n), sharding.names)
