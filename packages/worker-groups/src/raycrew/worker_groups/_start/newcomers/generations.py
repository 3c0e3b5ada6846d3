"""The next generation of a started group: the dead replaced, a new place to meet, and all told of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raycrew.cluster_core import Claim
from raycrew.worker_groups._calls import Whereabouts
from raycrew.worker_groups._health import Ended, end_workers
from raycrew.worker_groups._ray import while_connected
from raycrew.worker_groups._start.arguments import of_each_rank
from raycrew.worker_groups._start.layout import Layout
from raycrew.worker_groups._start.newcomers.arrivals import Arriving, Standby
from raycrew.worker_groups._start.newcomers.taking_over import TakeOver
from raycrew.worker_groups._start.report import starting
from raycrew.worker_groups._start.spec import GroupSpec, interpreter_for
from raycrew.worker_groups._start.startup import Started
from raycrew.worker_groups.errors import WorkerGroupError
from raycrew.worker_groups.sharding import WorkerFacts, assign_ranks, final_indices


def next_generation(
    spec: GroupSpec,
    claim: Claim,
    started: Started,
    ranks: Sequence[int],
    arrivals: Mapping[int, Standby | None],
    on_end: Callable[[Ended], None],
    go_on: Callable[[], object],
    on_built: Callable[[Started], None],
    before_told: Callable[[], object] = bool,
) -> None:
    """Replace the workers of some ranks, perhaps of none, and give the whole group a new generation.

    What is left of the old ones is ended first. The others are told at their next turn, after what they are
    doing, and only once the new ones' `__init__` has returned. All meet at another port than the generation
    before.

    Args:
        spec: What the group is.
        claim: Where.
        started: What it was so far.
        ranks: Whom to replace.
        arrivals: Positions among theirs that have another bundle now, and who takes over there; None where
            nobody stands by.
        on_end: Told what became of the new workers, when their start fails.
        go_on: Called now and then; what it raises ends the new workers.
        on_built: Told of the new generation once it stands, before the workers' own code hears of it.
        before_told: Called before anybody hears of it.

    Raises:
        WorkerFailureError: A new worker failed or was late, and the new ones have been ended; or a worker
            failed or was late in hearing of the generation, which stands all the same.
        WorkerGroupError: An old one could not be ended.
        StandbyLostError: Somebody who stood by died, or was stopped, before it had its rank; the new ones
            have been ended.
    """
    positions = [started.order[rank] for rank in ranks]
    with starting(spec, len(ranks)) as progress:
        if ranks:
            _end_old(spec.name, started, ranks)
        taking_over = TakeOver(go_on, [one for one in arrivals.values() if one is not None])
        launch = _Succession(spec, claim, progress, positions, on_end, taking_over)
        if not positions or any(arrivals.get(position) is None for position in positions):
            # A node that joined since the start may not have the environment yet.
            interpreter_for(spec.options.environments, spec.builder.fqn, spec.cluster)

        def built(successor: Started) -> None:
            on_built(successor)
            taking_over.is_over()

        with taking_over.watched():
            launch.succeed(launch.met(started, arrivals), built, before_told)


def add_workers(
    layout: Layout,
    on_end: Callable[[Ended], None],
    go_on: Callable[[], object],
    before_told: Callable[[], object],
    on_built: Callable[[Started], None],
) -> None:
    """Start workers at the positions that have none, as ranks after the others, in a new generation for all.

    Args:
        layout: The group with these positions.
        on_end: Told what became of the new workers, when their start fails.
        go_on: Called now and then; what it raises ends the new workers.
        before_told: Called once they stand, before anybody hears of the generation.
        on_built: See `next_generation`.

    Raises:
        WorkerFailureError: See `next_generation`.
        TypeError: Arguments don't fit `__init__`.
    """
    spec, claim, started = layout
    positions = range(len(started.order), len(spec.plan.seats))
    with starting(spec, len(positions)) as progress:
        launch = _Succession(spec, claim, progress, positions, on_end, go_on)
        launch.succeed(launch.prepared(started, positions), on_built, before_told)


def _end_old(group_name: str, started: Started, ranks: Sequence[int]) -> None:
    ended = end_workers({r: started.handles[r] for r in ranks}, {r: started.facts[r] for r in ranks})
    if ended.occupied:
        who = "; ".join(f"rank {rank}: {why}" for rank, why in ended.left.items())
        raise WorkerGroupError(f"{group_name}: a worker can't be replaced before it has ended ({who})")


class _Succession(Arriving):
    """One replacement of the workers at some positions, step by step."""

    def succeed(
        self,
        started: Started,
        on_built: Callable[[Started], None],
        before_told: Callable[[], object] = bool,
    ) -> None:
        """Start the new workers, and have all told of the generation."""
        try:
            successor = self._build(started)
            before_told()
            told = self._tell_places(successor)
            if 0 in told:
                successor.spare_port = None if self._has_hook(successor.info) else told[0]
            on_built(successor)  # whoever is not taken in is nobody's
        except BaseException:
            self._end()
            raise
        self._await_places(successor, told)

    def _build(self, started: Started) -> Started:
        new = [position for position in self.positions if position not in started.order]
        order, options, info = [*started.order, *new], started.options, started.info
        self._create(info, options)
        facts = self._facts(started)
        generation = started.ranks[0].generation + 1
        indices = final_indices(self.claim, facts)
        ranks = assign_ranks(order, facts, indices, self.spec.name, generation)
        own = of_each_rank(self.spec, info, options, order, ranks, self.positions)
        timings = self._begin(order, ranks, facts, own)
        here = [facts[position] for position in order]
        self.orders = {
            rank: self._orders(ranks[rank], here[rank], own[position])
            for rank, position in enumerate(order)
            if position not in self.handles
        }
        self._note_phases(order, facts, timings)
        handles = dict(zip(started.order, started.handles, strict=True)) | self.handles
        names = dict(zip(started.order, started.names, strict=True)) | self.names
        return Started(
            [handles[position] for position in order],
            ranks,
            here,
            order,
            info,
            options,
            self.report if self.positions else started.report,
            here[0].spare_port,
            [names[position] for position in order],
        )

    def _tell_places(self, started: Started) -> dict[int, Any]:
        """By rank, the calls in which those that live take their place in the new generation.

        Where their class hears of it, they take it only then, and these calls come before that.
        """
        if not self._has_hook(started.info):
            return {r: self._prepare(started.handles[r], orders) for r, orders in self.orders.items()}
        with while_connected(self.go_on):
            return {rank: started.handles[rank].__ray_ready__.remote() for rank in self.orders}

    def _await_places(self, started: Started, told: dict[int, Any]) -> None:
        """Have all workers do what their class does in a new generation, where it does anything."""
        if self._has_hook(started.info):
            places = [Whereabouts(self.spec.name, started.ranks[rank], started.facts[rank]) for rank in told]
            self._raise_failed(
                self._settle(list(told.values())), places, "the call before the new generation"
            )
            self._tell(started.info, started.handles, started.ranks, started.facts, self.orders)
            if 0 in told:  # for the next generation, which may come while rank 0 is busy
                started.spare_port = self._next_port(started)

    def _facts(self, started: Started) -> list[WorkerFacts]:
        """What each position's worker says; rank 0 leads to another port than it has so far."""
        found = dict(zip(started.order, started.facts, strict=True))
        first = started.order[0]
        if first not in self.positions:
            port = self._spare_port(started)
            found[first] = replace(found[first], master_port=port)
        found |= self._locate()
        return [found[position] for position in range(len(found))]

    def _spare_port(self, started: Started) -> int:
        """What rank 0 said; where that is of no use it is asked anew."""
        if isinstance(known := started.spare_port, int):
            return known
        told = self._settle([] if known is None else [known])
        if told.values.get(0):
            return int(told.values[0])
        place = Whereabouts(self.spec.name, started.ranks[0], started.facts[0])
        method = f"the call before generation {started.ranks[0].generation}"
        if told.pending:
            self._raise_failed(told, [place], method)
        settled = self._settle([self._next_port(started)])
        self._raise_failed(settled, [place], "the look for a port of the next generation")
        return int(settled.values[0])

    def _next_port(self, started: Started) -> Any:
        first: Any = started.handles[0]
        with while_connected(self.go_on):
            return first._raycrew_next_port.remote()  # noqa: SLF001
