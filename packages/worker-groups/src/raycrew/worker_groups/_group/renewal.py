"""Groups on Ray whose workers are replaced, and that get fewer or more of them."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

from ray.exceptions import RayError

from raycrew.cluster_core import Session
from raycrew.worker_groups._calls import dispatch_single, send_to_actors
from raycrew.worker_groups._group.life import (
    Supervision,
    claim_more,
    log_left,
    release_when_free,
)
from raycrew.worker_groups._group.record import record_of_group
from raycrew.worker_groups._group.standing_by import StandingBy
from raycrew.worker_groups._health import (
    Ended,
    Seen,
    Span,
    Workers,
    end_workers_of,
    look_before_end,
    observed,
    sights_of,
)
from raycrew.worker_groups._ray import ActorState, while_connected
from raycrew.worker_groups._start import (
    HOOK,
    JoinedClaim,
    Layout,
    StandbyLostError,
    Started,
    add_workers,
    next_generation,
    renewal_record,
)
from raycrew.worker_groups.balancing import ProcessUsage
from raycrew.worker_groups.errors import WorkerGroupClosedError, WorkerGroupError

logger = logging.getLogger(__name__)

_STATUS_S = 1.0
_LOOK_S = 0.1
_DOING = {"restart": "restarting", "start": "growing", "removal": "shrinking"}


class RenewedGroup(StandingBy):
    """A group on Ray, as far as its workers come and go."""

    _supervision: Supervision
    _is_torn: bool
    _in_order: bool

    def restart_failed_workers(self) -> list[int]:
        """Replace dead workers: same rank and arguments, new process; returns their ranks.

        Their bundles are the same, but where somebody stands by on another one, or their own are gone.
        Where one rank of a tied group is dead, all of that tied group are replaced. The group gets a new
        generation and a new master port. Workers that live keep their state; they see the new generation in
        `current_worker()` once their running call is over. Where the class has an `on_generation(worker)`,
        this waits until it has returned on every rank, in any order among them; calls wait meanwhile. Without
        one, calls on the ranks that are replaced wait, those on others go on. While another thread restarts
        the group, this waits for it and has the same outcome.

        Raises:
            WorkerFailureError: A new worker failed or was late; this can be tried again. Or `on_generation`
                failed on a rank: dead ones can be restarted again, the living called again by
                `renew_rendezvous()`.
            WorkerGroupClosedError: The group was shut down, perhaps meanwhile; no new worker is left.
        """
        return self._life.restart(self._replace_dead)

    def _replace_dead(self, pause: Callable[[], bool] | None = None) -> list[int]:
        dead, ranks = self._lost()
        if not ranks and (pause is None or not self._is_torn):
            return []
        self._life.replacing(ranks)
        if pause is not None and pause():
            dead, ranks = self._lost()  # others may have died meanwhile
        if ranks:
            logger.warning("%s: ranks %s are dead, restarting %s", self.name, sorted(dead), ranks)
            self._supervision.expect({r: self._started.facts[r] for r in ranks if r not in dead})
        self._next_generation(ranks)
        return ranks

    def _lost(self) -> tuple[set[int], list[int]]:
        """The dead ranks, and those that are to be replaced for it: all that are tied to one."""
        dead = self._dead()
        return dead, sorted(rank for tied in self._tied_groups if dead.intersection(tied) for rank in tied)

    def _dead(self) -> set[int]:
        """Ranks that are dead for Ray, or whose processes are gone; one may be known before the other."""
        self._open()
        workers = self._workers()
        states = self._answers(workers, range(self.world_size), _STATUS_S)
        return self._gone(workers) | {rank for rank, state in states.items() if state == "dead"}

    def _gone(self, workers: Workers) -> set[int]:
        """Ranks whose processes are gone, as their nodes see them."""
        sights = self._sights(workers, _STATUS_S)
        return {rank for rank, seen in sights.items() if isinstance(seen, Seen) and not seen.is_alive}

    def _next_generation(self, ranks: Sequence[int]) -> None:
        # No call may come between a survivor's new place and its `on_generation`.
        everybody = range(self.world_size) if HOOK in self._started.info.methods else ranks
        goes_on = self._spec.options.min_workers is not None
        self._life.replacing(ranks if goes_on else everybody)
        look_before_end(None)
        while not self._is_renewed(ranks, everybody):
            pass
        self._replenish()

    def _is_renewed(self, ranks: Sequence[int], everybody: Sequence[int]) -> bool:
        """Whether a new generation was made; not if somebody who stood by was lost in it, as each is once."""
        layout = Layout(self._spec, self._claim, self._started)
        hold = partial(self._life.replacing, everybody)
        try:
            with self._renewing("restart", ranks), self._crew.reserve.moving(layout, ranks) as move:

                def take(started: Started) -> None:
                    try:
                        self._take_layout(move.layout._replace(started=started))
                    finally:
                        move.is_made = self._claim is move.layout.claim

                self._is_torn = True
                next_generation(*move.layout, ranks, move.arrivals, self._note_stray, self._open, take, hold)
        except StandbyLostError as lost:
            logger.warning("%s: ranks %s are started once more: %s", self.name, sorted(ranks), lost)
            return False
        return True

    @contextmanager
    def _renewing(self, what: str, ranks: Sequence[int]) -> Iterator[None]:
        """Within, a new generation is made: of some ranks, to which this is done."""
        self._end_strays()
        outcome, began = "failed", time.monotonic()
        try:
            with self._shown(what, ranks):
                yield
            self._is_torn, outcome = False, "ok"
        finally:
            self._crew.directory.publish(self._members)
            self._note_generation(what, ranks, outcome, began)

    def _shown(self, what: str, ranks: Sequence[int]) -> AbstractContextManager[None]:
        """Within, others see what is done to which ranks."""
        n_ranks = min(ranks) if what == "removal" else max([self.world_size, *(rank + 1 for rank in ranks)])
        with while_connected(self._open):
            start = renewal_record(self._spec, _DOING[what], ranks, n_ranks)
        return self._crew.publication.renewing(start)

    def _note_generation(self, what: str, ranks: Sequence[int], outcome: str, began: float) -> None:
        if (observer := observed.by) is None:
            return
        what = f"{what} of {sorted(ranks)}" if ranks else "new rendezvous"
        detail: dict[str, str | int | float] = {"generation": self.generation, "outcome": outcome}
        observer.spanned(Span(self.name, "restarts", what, "restart", began, time.monotonic(), detail))
        if what.startswith("restart"):
            observer.counted("restarts", {"group": self.name}, len(ranks))

    def _end_strays(self) -> None:
        if left := {rank: why for stray in self._crew.end_strays() for rank, why in stray.left.items()}:
            who = "; ".join(f"rank {rank}: {why}" for rank, why in left.items())
            raise WorkerGroupError(f"{self.name}: workers of a failed restart have not ended yet ({who})")

    def _note_stray(self, ended: Ended) -> None:
        """Take in what became of new workers whose start failed."""
        ended = ended.renamed({position: rank for rank, position in enumerate(self._started.order)})
        log_left(self.name, ended)
        if ended.occupied:
            self._crew.strays.append(ended)

    def _take_layout(self, layout: Layout) -> None:
        super()._take_layout(layout)
        self._crew.handles, self._crew.facts = layout.started.handles, layout.started.facts
        self._usage = self._make_usage()
        tied = self.worker_to_tied_group_index if len(self._tied_groups) < self.world_size else {}
        self._crew.publish(record_of_group(*layout, tied))

    def _make_usage(self) -> ProcessUsage:
        places = zip(self._started.ranks, self._started.facts, strict=True)
        return ProcessUsage({info.rank: (facts.node_id, facts.pid) for info, facts in places})

    # Fewer and more.

    def _grow(self, n: int) -> None:
        before = self.world_size
        self._refuse_dead(range(before))
        own = JoinedClaim.of(self._claim).beside(self._crew.reserve.places)
        more, became = claim_more(self.cluster, own, n - before, self.name), [Ended()]
        try:
            layout = Layout(self._spec, self._claim, self._started).with_bundles(more)

            def hold() -> None:
                self._life.replacing(range(n))
                self._is_torn = True

            def take(started: Started) -> None:
                self._take_layout(layout._replace(started=started))

            with self._renewing("start", range(before, n)):
                add_workers(layout, became.append, self._open, hold, take)
        finally:
            if self.world_size == before:
                log_left(self.name, became[-1])
                release_when_free(became[-1], more)
        self._replenish()

    def _shrink(self, n: int, cleanup_method: str | None, timeout_s: float) -> tuple[int, ...]:
        before, gone = Layout(self._spec, self._claim, self._started), range(n, self.world_size)
        self._refuse_dead(range(n))
        self._life.replacing(range(self.world_size))
        layout, leaving = before.first(n), _Leaving(self._crew.session, before, n)
        last_words = self._last_words(leaving, cleanup_method)

        def take(started: Started) -> None:
            self._crew.strays.append(leaving.not_yet)  # first: a shutdown meanwhile ends them too
            self._take_layout(layout._replace(started=started))
            self._supervision.expect(leaving.facts)

        ended = leaving.not_yet
        try:
            with self._renewing("removal", gone):
                self._is_torn = True
                next_generation(*layout, (), {}, self._note_stray, self._open, take)
        finally:
            if self.world_size == n:
                ended = self._see_off(leaving, last_words, timeout_s)
        self._replenish()
        return ended.late

    def _last_words(self, leaving: "_Leaving", method: str | None) -> Callable[..., Any] | None:
        """What has removed workers call a method, within some seconds."""
        if method is None:
            return None
        return partial(
            send_to_actors,
            dispatch_single(self._shape, method, (), {}, ranks=list(leaving.handles)),
            self._started.handles,
            self._places,
            group_name=self.name,
            transport=self._spec.transport,
            in_order=self._in_order,
            keeper=None,
            session=self._crew.session,
        )

    def _see_off(self, leaving: "_Leaving", last_words: Callable[..., Any] | None, timeout_s: float) -> Ended:
        """End removed workers after the calls that they are in, and give their bundles back."""
        ended, deadline = leaving.not_yet, time.monotonic() + timeout_s
        try:
            with suppress(WorkerGroupClosedError):
                self._life.replacing(())
            if not self._in_order:  # they would end in the middle of their calls
                self._await_idle(leaving, deadline)
            if last_words is not None:
                self._await_said(last_words, deadline)
            left_s = max(0.0, deadline - time.monotonic())
            ended = leaving.end(left_s, lambda: self._life.state != "restarting")
            self._crew.strays = [stray for stray in self._crew.strays if stray is not leaving.not_yet]
        finally:
            log_left(self.name, ended)
            release_when_free(ended, leaving.bundles)
        if timeout_s and ended.late:
            logger.warning("%s: removed ranks %s were cut in their calls", self.name, list(ended.late))
        return ended

    def _await_said(self, last_words: Callable[..., Any], deadline: float) -> None:
        try:
            said = last_words(timeout=max(0.0, deadline - time.monotonic()))
            while self._life.state == "restarting" and not said.wait(_LOOK_S):
                if time.monotonic() >= deadline:
                    break
            said.get_results(timeout=0.0)
        except (WorkerGroupError, RayError) as error:
            logger.warning("%s: the clean-up of removed ranks: %s", self.name, error)

    def _await_idle(self, leaving: "_Leaving", deadline: float) -> None:
        facts = list(leaving.facts.values())
        while self._life.state == "restarting" and time.monotonic() < deadline:
            sights = sights_of(facts, _STATUS_S).values()
            if all(isinstance(seen, Seen) and not seen.calls for seen in sights):
                return
            time.sleep(_LOOK_S)

    def _refuse_dead(self, ranks: Sequence[int]) -> None:
        if dead := sorted(self._gone(self._workers()).intersection(ranks)):
            raise WorkerGroupError(
                f"{self.name}: ranks {dead} are dead; restart_failed_workers() first, then get fewer or more"
            )


class _Leaving:
    """Workers that are removed, from some rank on."""

    def __init__(self, session: Session, layout: Layout, first: int) -> None:
        started = layout.started
        self.handles = dict(list(enumerate(started.handles))[first:])
        self.facts = dict(list(enumerate(started.facts))[first:])
        self.bundles = JoinedClaim.of(layout.claim).at(started.order[first:])
        self.end = partial(end_workers_of, session, self.handles, self.facts)
        why = dict.fromkeys(self.handles, "it was removed, and has not ended yet")
        self.not_yet = Ended(left=why, occupied=True, again=self.end)


class Replaceable:
    """A group as its supervision sees it."""

    def __init__(self, group: RenewedGroup) -> None:
        self._group = group

    def replace_dead(self, pause: Callable[[], bool]) -> list[int]:
        """Replace dead workers as `restart_failed_workers` does, and to the end if nobody waits any more."""
        group = self._group
        return group._life.restart(lambda: group._replace_dead(pause), apart=True)  # noqa: SLF001

    @property
    def is_torn(self) -> bool:
        """Whether the group's last new generation failed."""
        return self._group._is_torn  # noqa: SLF001

    def is_present(self, rank: int | None, node_id: str | None, pid: int | None) -> bool:
        """Whether a process is the one that a rank has now."""
        facts = dict(enumerate(self._group._started.facts))  # noqa: SLF001
        return rank in facts and (facts[rank].node_id, facts[rank].pid) == (node_id, pid)

    def goes_on_without(self, ranks: Collection[int | None]) -> bool:
        """Whether it can be used while these ranks are replaced."""
        least = self._group._spec.options.min_workers  # noqa: SLF001
        there = set(range(self._group.world_size)) - set(self._group.absent_ranks)
        return least is not None and len(there.difference(ranks)) >= least

    def is_without(self, ranks: Collection[int | None]) -> bool:
        """Whether it is used without these ranks now."""
        return set(self._group.absent_ranks).issuperset(ranks)

    def status(self, rank: int) -> ActorState:
        """What a rank's worker is up to; its node may know of its end before Ray does, which may be deaf."""
        self._group._open()  # noqa: SLF001
        workers = self._group._workers()  # noqa: SLF001
        if rank >= len(workers.handles) or rank in self._group._gone(workers):  # noqa: SLF001
            return "dead"
        return self._group._answers(workers, [rank], _STATUS_S)[rank]  # noqa: SLF001
