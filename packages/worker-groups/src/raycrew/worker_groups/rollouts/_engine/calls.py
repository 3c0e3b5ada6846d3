"""Rollouts as calls of a group's workers: sent, waited for, and ended with their process where they don't."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raycrew.cluster_core import Session
from raycrew.worker_groups._calls import has_died, left
from raycrew.worker_groups._group import RayWorkerGroup
from raycrew.worker_groups._health import end_workers
from raycrew.worker_groups.balancing import Item, LoadBalancer, LostWorkerError, Sent, WorkerLoad, ended_of
from raycrew.worker_groups.errors import (
    GroupResizedError,
    ResultTimeoutError,
    WorkerFailureError,
    WorkerGroupError,
)
from raycrew.worker_groups.rollouts._engine.company import Company, Process
from raycrew.worker_groups.rollouts._engine.tasks import Retries, Task
from raycrew.worker_groups.rollouts._telling import Tally
from raycrew.worker_groups.rollouts._values import Call, CurrentRollout, Outcome, Wishes

#: So long the answer of a worker may take beyond what its rollout may.
ANSWER_S = 5.0
_ASK_S = 10.0
_POLL_S = 0.05
_LOOK_S = 1.0

#: Processes that were ended: because of which rollout of whose calls.
Ended = dict[Process, tuple[object, CurrentRollout]]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a rollout may take.

    Attributes:
        deadline_s: By itself; None for as long as it takes.
        grace_s: From its being cancelled on.
    """

    deadline_s: float | None
    grace_s: float

    @property
    def total_s(self) -> float | None:
        """Until its worker must have answered."""
        return None if self.deadline_s is None else self.deadline_s + self.grace_s + ANSWER_S


class RolloutCalls:
    """The workers of a pool, for one stream of rollouts; see `Workers` of the wing of streams.

    Args:
        group: The group, with a balancer.
        limits: Of each rollout.
        wishes: What is wanted of results.
        retries: Which ones are tried again.
        wake: Set when the source may have something more.
        tally: Counts.
        ended: What is known of processes, by the calls of all collections of the group.
        company: Who is in them, by the same.
    """

    def __init__(
        self,
        group: RayWorkerGroup,
        limits: Limits,
        wishes: Wishes,
        retries: Retries,
        wake: threading.Event,
        tally: Tally,
        ended: Ended,
        company: Company,
    ) -> None:
        self._group, self._limits, self._wishes, self._retries = group, limits, wishes, retries
        self._wake, self._tally = wake, tally
        self._balancer: LoadBalancer = group.balancer
        self._tasks: dict[Sent, Task] = {}
        self._ended, self._company, self._own = ended, company, object()
        self._suspects: deque[Task] = deque()
        self._is_one_alone = False
        self.is_source_late = False

    def loads(self) -> Sequence[WorkerLoad]:
        """See `Workers`; a worker that is kept for one rollout is there for that alone."""
        loads = self._balancer.loads()
        kept, own = self._company.kept(self._own), self._kept()
        busy = None if own is None or not own.outstanding else own.rank
        return [load for load in loads if load.rank not in kept and load.rank != busy]

    def next_alone(self) -> Task | None:
        """A rollout that was in a process that died, once a worker has nothing else to do."""
        if self._is_one_alone or (own := self._kept()) is None or own.outstanding:
            return None
        task = self._suspects.popleft()
        task.place, self._is_one_alone = own.rank, True
        return task

    def _kept(self) -> WorkerLoad | None:
        """The worker that is kept for those; None where none is needed, or can be had."""
        if self._suspects or self._is_one_alone:
            return self._company.keep(self._own, self._balancer.loads())
        self._company.let_go(self._own)
        return None

    def send(self, rank: int, item: Item) -> Sent:
        """See `Workers`."""
        task: Task = item.value
        task.place = None
        limits, is_again = self._limits, rank in task.tried
        end_s = None if limits.total_s is None else limits.total_s + _ASK_S
        call = Call(task.which, task.prompt.data, limits.deadline_s, limits.grace_s, is_again, end_s)
        sent = self._balancer.send(rank, "run", (call, self._wishes), {}, limits.total_s)
        self._company.enter(_process_of(sent))
        self._tasks[sent] = task
        return sent

    def wait(self, sent: Sequence[Sent]) -> Sequence[Sent]:
        """See `Workers`."""
        if not sent:
            self._wake.wait(_LOOK_S)
            self._wake.clear()
            Session.check_wanted()
            return []
        deadlines = [one.deadline for one in sent if one.deadline is not None]
        longest_s = _POLL_S if self.is_source_late else _LOOK_S
        timeout_s = left(min(deadlines), longest_s) if deadlines else longest_s
        done = ended_of(sent, 1, timeout_s, fetch_local=True)
        now = time.monotonic()
        return done or [one for one in sent if one.deadline is not None and one.deadline <= now]

    def collect(self, sent: Sent) -> tuple[Task, Outcome | None]:
        """See `Workers`; without an outcome it runs once more, alone."""
        task = self._tasks.pop(sent)
        self._balancer.returned(sent)
        self._is_one_alone &= not task.is_suspect
        outcome = self._outcome(sent, task.which)
        if outcome is None:  # another's process was ended, and it with that
            return self._again(task)
        if outcome.kind == "lost":
            task.is_suspect = True
            if not self._company.was_alone(_process_of(sent)):
                return self._again(task)
        else:
            self._company.leave(_process_of(sent))
        if outcome.kind is None:
            return task, outcome
        if outcome.kind == "stuck":
            self._end_process(sent, task.which)
            outcome = outcome._replace(kind="late")
        task.attempts += 1
        task.tried.add(sent.rank)
        if self._retries.allow(task, outcome):
            self._tally.count("retried")
            return self._again(task)
        return task, outcome

    def _again(self, task: Task) -> tuple[Task, None]:
        """Have a rollout run once more: one that was in a process that died, alone.

        Raises:
            LostWorkerError: It may run anywhere.
        """
        if not task.is_suspect:
            raise LostWorkerError
        self._suspects.append(task)
        return task, None

    def abandon(self, sent: Sequence[Sent]) -> None:
        """See `Workers`."""
        self._company.let_go(self._own)
        for one in sent:
            self._balancer.returned(one)
            self._company.leave(_process_of(one))
            one.future.cancel()

    def _outcome(self, sent: Sent, which: CurrentRollout) -> Outcome | None:
        """What became of a rollout; None where it is to run elsewhere for no fault of its own."""
        try:
            outcome: Outcome = sent.future.get_results()[0]
        except ResultTimeoutError:
            if _process_of(sent) not in self._ended:
                self._end_process(sent, self._blocking(sent) or which)
            return self._of_ended(sent, which)
        except GroupResizedError:  # it died, and there is no such rank any more
            return None
        except WorkerFailureError as error:
            if not has_died(error):
                return Outcome(kind="raised", message=str(error))
            self._balancer.lose(sent)
            if _process_of(sent) in self._ended:
                return self._of_ended(sent, which)
            return Outcome(kind="lost", message=str(error))
        return outcome

    def _of_ended(self, sent: Sent, which: CurrentRollout) -> Outcome | None:
        """What became of a rollout whose process was ended because of one of them."""
        own = (self._own, which)
        if self._ended.get(_process_of(sent), own) != own:
            return None
        message = f"it ran past its deadline of {self._limits.deadline_s:g} s, and its worker did not answer"
        return Outcome(kind="late", message=message)

    def _blocking(self, sent: Sent) -> CurrentRollout | None:
        """Which rollout keeps its worker's event loop to itself, if that can be told."""
        try:
            found: CurrentRollout | None
            (found,) = self._group.on([sent.rank], timeout=_ASK_S).call("blocking").get_results()
        except WorkerGroupError:
            return None
        return found

    def _end_process(self, sent: Sent, guilty: CurrentRollout) -> None:
        """End the worker that a rollout keeps; the next call that fails of it has the group replace it."""
        process = _process_of(sent)
        now = {info.rank: info.generation for info in self._group.ranks}
        if process in self._ended or now.get(sent.rank) != sent.generation:
            return
        self._ended[process] = (self._own, guilty)
        workers: Any = self._group._workers()  # noqa: SLF001 - made for this package
        end_workers({sent.rank: workers.handles[sent.rank]}, {sent.rank: workers.facts[sent.rank]})


def _process_of(sent: Sent) -> Process:
    return sent.rank, sent.generation
