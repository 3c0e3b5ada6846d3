"""Asking the nodes of workers when calls ran, and what their clocks show."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

from raycrew.worker_groups._health.observers import LOOK_WITHIN_S
from raycrew.worker_groups._health.questions import UnansweredError, ask_timed, by_node
from raycrew.worker_groups._health.timeline.clocks import Clocks
from raycrew.worker_groups._health.timeline.ledger import Gone, Ran
from raycrew.worker_groups._on_nodes import clock_name, notes_in
from raycrew.worker_groups.sharding import WorkerFacts

logger = logging.getLogger(__name__)


#: How many at most, and those.
_Told = tuple[int, Iterator[Ran | Gone]]
#: A worker's group, rank and facts, and since when it is followed.
_Worker = tuple[str, int, WorkerFacts, float]


class NodeWorkers:
    """Workers of groups on Ray, asked by the watches of their nodes: one question per node, not per call.

    Attributes:
        clocks: Of their nodes.
        lost: How many calls were overwritten before they were asked for.
    """

    def __init__(self) -> None:
        self.clocks = Clocks(clock_name())
        self.lost = 0
        self._began = time.monotonic()
        self._workers: dict[str, _Worker] = {}
        self._seen: dict[str, int] = {}
        self._silent: set[str] = set()
        self._asking = threading.RLock()  # a signal's handler may ask, too
        self._is_asking = False
        self._waiting: list[_Told] = []

    def follow(self, group: str, places: Mapping[int, Any]) -> None:
        """See `Workers`; what is noted meanwhile is kept for whoever asks next."""
        now = time.monotonic()
        added = {
            place.facts.mark: (group, rank, place.facts, now)
            for rank, place in places.items()
            if place.facts is not None and place.facts.mark not in self._workers
        }
        if not added:
            return
        self._workers |= added
        with self._alone(2 * LOOK_WITHIN_S) as left_s:
            if left_s > 0:
                self._waiting += self._ask(added, LOOK_WITHIN_S, may_make=True)

    def ask(self, timeout_s: float = LOOK_WITHIN_S, *, is_last: bool = False) -> _Told:
        """See `Workers`; a node that does not answer is asked again the next time."""
        with self._alone(timeout_s) as left_s:
            if left_s <= 0:
                return 0, iter(())
            waiting, self._waiting = self._waiting, []
            question = "record_last" if is_last else "record"
            told = [*waiting, *self._ask(dict(self._workers), left_s, question, may_make=False)]
            return sum(n for n, _ in told), chain.from_iterable(ran for _, ran in told)

    @contextmanager
    def _alone(self, timeout_s: float) -> Iterator[float]:
        """Seconds left once nobody else asks; none where that takes too long, or it is this thread."""
        due = time.monotonic() + timeout_s
        if not self._asking.acquire(timeout=timeout_s):
            yield 0.0
            return
        before, self._is_asking = self._is_asking, True
        try:
            yield 0.0 if before else due - time.monotonic()
        finally:
            self._is_asking = before
            self._asking.release()

    def _ask(
        self,
        workers: Mapping[str, _Worker],
        timeout_s: float,
        question: str = "record",
        *,
        may_make: bool,
    ) -> list[_Told]:
        known = dict(enumerate(workers.values()))
        facts = {key: worker[2] for key, worker in known.items()}
        nodes, found = by_node(facts), list[_Told]()
        seen = {key: self._seen.get(facts[key].mark) for key in facts}
        for node_id, answer in ask_timed(question, facts, timeout_s, seen, may_make=may_make).items():
            if isinstance(answer, UnansweredError) and answer.node_is_gone:
                found += [told for key in nodes[node_id] for told in self._drop(*known[key], None)]
                continue
            if isinstance(answer, UnansweredError):
                self._note_silence(node_id, answer)
                for key in nodes[node_id]:  # it may note calls all the same: all are asked for the next time
                    self._seen.setdefault(facts[key].mark, 0)
                continue
            for key, told in zip(nodes[node_id], answer.told, strict=True):
                if told is None or isinstance(told, str):  # It is gone and forgotten, or can't tell.
                    found += self._drop(*known[key], told)
                else:
                    found += self._taken_in(known[key], told, answer.asked, answer.came)
        return found

    def _taken_in(self, worker: _Worker, told: tuple[Any, ...], before: float, after: float) -> list[_Told]:
        group, rank, facts, _ = worker
        clock, theirs, first, last, data = told
        ahead_s = self.clocks.observe(facts.node_id, clock, theirs, before, after).ahead_s
        self._seen[facts.mark] = last
        noted = last - first
        return [(noted, self._ran(group, rank, ahead_s, data, noted))] if noted > 0 else []

    def _ran(self, group: str, rank: int, ahead_s: float, data: bytes, noted: int) -> Iterator[Ran]:
        """One after the other: thousands at once would have the garbage collector look at everything."""
        is_whole = True
        for call, method, began, ended, paused_s in notes_in(data):
            noted -= 1
            if ended - ahead_s >= self._began:
                yield Ran(call, group, rank, method, began - ahead_s, ended - ahead_s, paused_s)
            else:  # what was overwritten is older than this: it was before those
                is_whole = False
        if is_whole:
            self.lost += max(0, noted)

    def _drop(self, group: str, rank: int, facts: WorkerFacts, since: float, why: str | None) -> list[_Told]:
        self._seen.pop(facts.mark, None)
        is_known = self._workers.pop(facts.mark, None) is not None
        if is_known and why is not None:
            logger.warning("when rank %d of %s runs calls is not known: %s", rank, group, why)
        if not is_known or why is not None:
            return []
        in_its_place = [one[3] for one in list(self._workers.values()) if one[:2] == (group, rank)]
        before = min((began for began in in_its_place if began > since), default=time.monotonic())
        return [(1, iter((Gone(group, rank, before),)))]

    def _note_silence(self, node_id: str, why: UnansweredError) -> None:
        say = logger.debug if node_id in self._silent else logger.warning
        self._silent.add(node_id)
        say("when calls ran is not known for now: %s", why)
