"""How the workers of a group are: asked of their nodes' watches, which answer whatever the workers do."""

import logging
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from raycrew.worker_groups._health.observers import observed
from raycrew.worker_groups._health.questions import UnansweredError, ask_within, by_node
from raycrew.worker_groups._health.reports import (
    ResourceUsage,
    Seen,
    StuckWorker,
    WorkerStatus,
    check_threshold,
    checked_patience,
    why_stuck,
)
from raycrew.worker_groups._ray import ActorState
from raycrew.worker_groups.sharding import WorkerFacts

logger = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.1  # for an answer before the next look, and twice as long each time

#: By rank, what is seen of a worker, or why that can't be told.
SeenByRank = Mapping[int, Seen | str]


class Workers(NamedTuple):
    """Workers at one moment, in rank order: what is known of their processes, and their handles."""

    facts: Sequence[WorkerFacts]
    handles: Sequence[Any]


class GroupHealth:
    """What a group tells of its workers' health."""

    _stalls: frozenset[tuple[int, int, int | None, str]] = frozenset()

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the group."""

    @abstractmethod
    def _open(self) -> Any:
        """Raise unless the group can be asked."""

    @abstractmethod
    def _workers(self) -> Workers:
        """The workers of this moment; a restart may replace some while they are asked about."""

    @abstractmethod
    def _sights(self, workers: Workers, timeout_s: float) -> SeenByRank:
        """How each worker is seen to be."""

    @abstractmethod
    def _answers(self, workers: Workers, ranks: Sequence[int], timeout_s: float) -> Mapping[int, ActorState]:
        """Whether these workers answer themselves."""

    def _note_death(self, rank: int, facts: WorkerFacts, seen: Seen | str) -> None:
        """Take in that a rank's worker was seen to be dead."""

    def _note_stuck(self, stuck: dict[int, StuckWorker]) -> dict[int, StuckWorker]:
        """Take in that workers were found to be stuck; gives them as they are told of."""
        return stuck

    def get_worker_status(self, timeout: float = 1.0) -> dict[int, WorkerStatus]:
        """What each rank is up to: "ready", "busy" or "dead", with what its heartbeat tells.

        The answer is there at once while workers are busy: their nodes' watches tell. A worker is "ready" if
        it is in no call and answers itself within `timeout` seconds. A worker whose node's watch does not
        answer within them is asked itself, and is "busy" if that takes as long again.

        Raises:
            TypeError: `timeout` is no number.
            ValueError: It is `nan`, or below zero.
        """
        timeout = checked_patience(timeout)
        self._open()
        workers = self._workers()
        sights, found = self._statuses(workers, timeout)
        for rank in (rank for rank, status in found.items() if status == "dead"):
            self._note_death(rank, workers.facts[rank], sights[rank])
        return found

    def _statuses(self, workers: Workers, timeout_s: float) -> tuple[SeenByRank, dict[int, WorkerStatus]]:
        """How some workers are seen to be, and what they are up to, by position."""
        sights = dict(self._sights(workers, timeout_s))
        answers = self._await_answers(workers, sights, timeout_s)
        return sights, {i: _status(seen, answers.get(i, "busy")) for i, seen in sights.items()}

    def ping(self, ranks: Sequence[int] | None = None, timeout: float = 1.0) -> dict[int, WorkerStatus]:
        """What some ranks are up to, as their nodes' watches see them: the workers themselves are not asked.

        So this answers at once, whatever they are at; `silent_s` is the age of the last tick of the call that
        runs. A rank whose node does not answer within `timeout` seconds, or can't tell, is left out.

        Args:
            ranks: Which; None for all.
            timeout: How long the nodes' watches may take to answer.

        Raises:
            TypeError: `timeout` is no number.
            ValueError: There is no such rank; or `timeout` is `nan`, or below zero.
        """
        timeout = checked_patience(timeout)
        self._open()
        workers = self._workers()
        asked = range(len(workers.facts)) if ranks is None else ranks
        if unknown := [rank for rank in asked if not 0 <= rank < len(workers.facts)]:
            raise ValueError(f"{self.name!r} has no ranks {unknown}, only 0 to {len(workers.facts) - 1}")
        some = Workers([workers.facts[rank] for rank in asked], [workers.handles[rank] for rank in asked])
        found = {}
        for position, seen in self._sights(some, timeout).items():
            rank = asked[position]
            if not isinstance(seen, Seen):
                logger.warning("how rank %d of %s is can't be told: %s", rank, self.name, seen)
                continue
            if not seen.is_alive:
                self._note_death(rank, workers.facts[rank], seen)
            found[rank] = _status(seen, "ready" if seen.is_idle else "busy")
        return found

    def _await_answers(
        self, workers: Workers, sights: dict[int, Seen | str], timeout_s: float
    ) -> dict[int, ActorState]:
        """The answers of those who may answer, who are looked at again meanwhile: a call may just begin."""
        answers, due, wait_s = dict[int, ActorState](), time.monotonic() + timeout_s, _FIRST_WAIT_S
        unsure = [rank for rank, seen in sights.items() if _may_answer(seen)]
        while unsure:
            left_s = max(0.0, due - time.monotonic())
            told = self._answers(workers, unsure, min(wait_s, left_s))
            answers |= told
            late = [rank for rank, state in told.items() if state == "busy"]
            if not late or wait_s >= left_s:
                break
            again = self._sights(workers, left_s - wait_s)
            sights |= {rank: again[rank] for rank in late if isinstance(again[rank], Seen)}
            unsure, wait_s = [rank for rank in late if _may_answer(sights[rank])], 2 * wait_s
        return answers

    def get_resource_usage(self, timeout: float = 5.0) -> dict[int, ResourceUsage]:
        """What each rank uses: cores, memory, memory of devices.

        Nothing is known of a rank that is dead, or whose node does not answer within `timeout` seconds.

        Raises:
            TypeError: `timeout` is no number.
            ValueError: It is `nan`, or below zero.
        """
        timeout = checked_patience(timeout)
        self._open()
        sights = self._sights(self._workers(), timeout)
        return {r: ResourceUsage.of(s) if isinstance(s, Seen) else ResourceUsage() for r, s in sights.items()}

    def detect_stuck_workers(self, threshold_s: float, timeout: float = 5.0) -> dict[int, StuckWorker]:
        """The workers that do not go on, by rank, and why.

        Found are those whose process is stopped, those in which something has held the interpreter's lock
        for `threshold_s`, and those that have been in one call for so long without saying that they go on:
        in a collective operation that never ends, say. A method that may take longer calls
        `current_worker().tick()` now and then; each item of a stream is a tick, too. A dead worker is not
        stuck: see `get_worker_status`. One whose node does not answer within `timeout` seconds is not named,
        and a warning is logged.

        Args:
            threshold_s: After how many seconds; below 2, it is 2 for a lock that is held. A stopped process
                is found after 2 seconds in any case.
            timeout: How long the nodes' watches may take to answer.

        Raises:
            TypeError: `threshold_s` or `timeout` is no number.
            ValueError: `threshold_s` is not above 0; or `timeout` is `nan`, or below zero.
        """
        threshold_s, timeout = check_threshold(threshold_s), checked_patience(timeout)
        self._open()
        workers, stuck, unsure = self._workers(), {}, set()
        for (rank, seen), facts in zip(self._sights(workers, timeout).items(), workers.facts, strict=True):
            if not isinstance(seen, Seen):
                logger.warning("whether rank %d is stuck can't be told: %s", rank, seen)
                unsure.add(rank)
            elif (found := _stuck(rank, seen, facts, threshold_s)) is not None:
                stuck[rank] = found
        self._count_stalls(stuck, unsure)
        return self._note_stuck(stuck)

    def _count_stalls(self, stuck: Mapping[int, StuckWorker], unsure: Set[int]) -> None:
        """Count those that were not found before; of some it is not sure whether they still are stuck."""
        found = {(rank, worker.pid, worker.sequence, worker.reason) for rank, worker in stuck.items()}
        new, ranks = found - self._stalls, stuck.keys() | unsure
        self._stalls = frozenset(found | {one for one in self._stalls if one[0] in ranks})
        if (observer := observed.by) is not None:
            for rank, _, _, reason in sorted(new):
                observer.counted("stalls", {"group": self.name, "rank": str(rank), "reason": reason})


def sights_of(workers: Sequence[WorkerFacts], timeout_s: float) -> SeenByRank:
    """How the watches see these workers, by position."""
    known = dict(enumerate(workers))
    nodes, found = by_node(known), dict[int, Seen | str]()
    for node_id, answer in ask_within("see", known, timeout_s).items():
        for i, key in enumerate(nodes[node_id]):
            if isinstance(answer, UnansweredError):
                found[key] = str(answer)
            else:
                found[key] = answer[i] if isinstance(answer[i], str) else Seen.of(answer[i])
    return dict(sorted(found.items()))


def last_seen(workers: Mapping[int, WorkerFacts], timeout_s: float) -> dict[int, Seen]:
    """What the watches that there are have seen of some workers, dead ones too; no watch is made for it."""
    nodes, found = by_node(workers), dict[int, Seen]()
    for node_id, answer in ask_within("see", workers, timeout_s, may_make=False).items():
        if not isinstance(answer, UnansweredError):
            told = zip(nodes[node_id], answer, strict=True)
            found |= {key: Seen.of(seen) for key, seen in told if not isinstance(seen, str)}
    return found


def _may_answer(seen: Seen | str) -> bool:
    return not isinstance(seen, Seen) or (seen.is_alive and (seen.is_idle or not seen.is_told))


def _status(seen: Seen | str, answer: ActorState) -> WorkerStatus:
    if not isinstance(seen, Seen):
        return WorkerStatus(answer)
    if not seen.is_alive or answer == "dead":
        return WorkerStatus("dead")
    return WorkerStatus(answer, seen)


def _stuck(rank: int, seen: Seen, facts: WorkerFacts, threshold_s: float) -> StuckWorker | None:
    why = why_stuck(seen, threshold_s)
    if why is None:
        return None
    reason, call, silent_s = why
    return StuckWorker(
        rank=rank,
        reason=reason,
        method=None if call is None else call.method,
        sequence=None if call is None else call.sequence,
        running_s=None if call is None else call.running_s,
        silent_s=silent_s,
        pid=facts.pid,
        node_id=facts.node_id,
    )
