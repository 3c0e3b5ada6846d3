"""Who sits where: a group's plan, its bundles and its workers, and how these become fewer or more."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, Self

from raycrew.cluster_core import Bundle, Claim, Placement
from raycrew.worker_groups._start.spec import GroupSpec
from raycrew.worker_groups._start.startup import Started
from raycrew.worker_groups.sharding import Seat, SeatPlan, first_seats, moved_seats, resized, with_seats


@dataclass(frozen=True, slots=True)
class JoinedClaim:
    """Bundles of several claims as one claim, in an order of their own.

    Attributes:
        seats: The claim of each bundle, and its position in that.
    """

    seats: tuple[tuple[Claim, int], ...]

    @classmethod
    def of(cls, claim: Claim) -> Self:
        """A claim as one of these."""
        return claim if isinstance(claim, cls) else cls(tuple((claim, p) for p in range(len(claim.bundles))))

    def at(self, positions: Iterable[int]) -> "JoinedClaim":
        """Some of the bundles."""
        return JoinedClaim(tuple(self.seats[position] for position in positions))

    def beside(self, other: Claim) -> "JoinedClaim":
        """These bundles, and then those of another claim."""
        return JoinedClaim((*self.seats, *JoinedClaim.of(other).seats))

    @property
    def bundles(self) -> Sequence[Bundle]:
        """See `Claim`."""
        known = {id(claim): claim.bundles for claim, _ in self._claims()}
        return [known[id(claim)][position] for claim, position in self.seats]

    def actor_options(self, position: int) -> dict[str, Any]:
        """See `Claim`."""
        claim, own = self.seats[position]
        return claim.actor_options(own)

    def learn(self, devices: Mapping[int, int]) -> None:
        """See `Claim`."""
        for claim, positions in self._claims():
            claim.learn({self.seats[p][1]: devices[p] for p in positions if p in devices})

    def settle(self) -> None:
        """See `Claim`."""
        for claim, _ in self._claims():
            claim.settle()

    def check(self) -> None:
        """See `Claim`."""
        for claim, _ in self._claims():
            claim.check()

    def give_back(self, positions: Collection[int]) -> None:
        """See `Claim`."""
        for claim, own in self._claims():
            claim.give_back([self.seats[p][1] for p in own if p in positions])

    def release(self) -> None:
        """Give all of these bundles back, and nothing else of the claims that they are of; idempotent."""
        self.give_back(range(len(self.seats)))

    def _claims(self) -> list[tuple[Claim, list[int]]]:
        """Each claim, and positions of its bundles here."""
        positions = sorted(range(len(self.seats)), key=lambda p: id(self.seats[p][0]))
        grouped = (list(own) for _, own in groupby(positions, key=lambda p: id(self.seats[p][0])))
        return [(self.seats[own[0]][0], sorted(own)) for own in grouped]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A bundle on which any rank may have its worker.

    Attributes:
        claim: It alone.
        seat: Of a worker there.
    """

    claim: JoinedClaim
    seat: Seat

    @property
    def bundle(self) -> Bundle:
        """The bundle."""
        return self.claim.bundles[0]

    def has_room_for(self, bundle: Bundle) -> bool:
        """Whether it holds as much as another bundle does."""
        own = self.bundle.resources
        return all(own.get(name, 0.0) >= amount for name, amount in bundle.resources.items())


class Layout(NamedTuple):
    """Who sits where.

    Attributes:
        spec: What the group is, and its plan.
        claim: Its bundles, by position.
        started: Its workers.
    """

    spec: GroupSpec
    claim: Claim
    started: Started

    @property
    def tied_groups(self) -> list[list[int]]:
        """Ranks of each tied group, leader first."""
        rank_of = {position: rank for rank, position in enumerate(self.started.order)}
        groups = [[rank_of[p] for p in group] for group in self.spec.plan.tied_groups]
        return groups if self.spec.plan.ordered else sorted(groups)

    @property
    def placements(self) -> list[Placement]:
        """Which bundle each rank occupies, and how much of it; asks where the claims are kept."""
        bundles = self.claim.bundles
        tied = {rank: i for i, ranks in enumerate(self.tied_groups) if len(ranks) > 1 for rank in ranks}
        return [
            Placement(
                info.rank,
                info.bundle_index,
                _share(bundles[position], self.claim.actor_options(position)),
                tied.get(info.rank),
            )
            for info, position in zip(self.started.ranks, self.started.order, strict=True)
        ]

    def place(self, position: int) -> Place:
        """The bundle of a position."""
        return Place(JoinedClaim.of(self.claim).at([position]), self.spec.plan.seats[position])

    def moved(self, places: Mapping[int, Place]) -> "Layout":
        """The same workers, of which those at some positions are to be replaced by some on other bundles."""
        if not places:
            return self
        seats = list(JoinedClaim.of(self.claim).seats)
        for position, place in places.items():
            (seats[position],) = place.claim.seats
        plan = moved_seats(self.spec.plan, {position: place.seat for position, place in places.items()})
        return self._replace(spec=replace(self.spec, plan=plan), claim=JoinedClaim(tuple(seats)))

    def first(self, n: int) -> "Layout":
        """The first `n` ranks alone, each at the position that is its rank; no ranks are tied."""
        order, old = self.started.order, self.started
        configured = tuple(old.info.configured[position] for position in order[:n])
        started = replace(
            old,
            handles=old.handles[:n],
            ranks=old.ranks[:n],
            facts=old.facts[:n],
            names=old.names[:n],
            order=list(range(n)),
            options=[old.options[position] for position in order[:n]] if old.options else [],
            info=replace(old.info, configured=configured),
        )
        plan = first_seats(self.spec.plan, order, n)
        claim = JoinedClaim.of(self.claim).at(order[:n])
        return Layout(_of_size(self.spec, plan), claim, started)

    def with_bundles(self, more: Claim) -> "Layout":
        """The same workers, and positions of further ones that have yet to be started, in order."""
        here = self.first(len(self.started.order))
        plan = with_seats(here.spec.plan, self.spec.cluster.bundles, more.bundles)
        claim = JoinedClaim.of(here.claim).beside(more)
        return Layout(_of_size(here.spec, plan), claim, here.started)


def _of_size(spec: GroupSpec, plan: SeatPlan) -> GroupSpec:
    axes = spec.options.sharding_annotations
    axes = None if axes is None else resized(axes, len(plan.seats))
    return replace(spec, plan=plan, options=replace(spec.options, sharding_annotations=axes))


def _share(bundle: Bundle, options: Mapping[str, Any]) -> float:
    for resource, option in (("GPU", "num_gpus"), ("CPU", "num_cpus")):
        if bundle.resources.get(resource):
            return float(options.get(option, 0) / bundle.resources[resource])
    return 1.0
