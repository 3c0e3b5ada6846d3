"""The thread that has prompts rolled out while whoever collects does something else."""

import threading
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from raycrew.cluster_core import Session
from raycrew.worker_groups.balancing import LATER, Stream
from raycrew.worker_groups.errors import SampleQueueError, WorkerGroupClosedError
from raycrew.worker_groups.rollouts._delivery import Done, Progress
from raycrew.worker_groups.rollouts._engine.calls import RolloutCalls
from raycrew.worker_groups.rollouts._engine.prompts import END, Identified, Prompts
from raycrew.worker_groups.rollouts._engine.tasks import Prompt, Task, Untried
from raycrew.worker_groups.rollouts._telling import RolloutStats, Tally
from raycrew.worker_groups.rollouts._values import Outcome
from raycrew.worker_groups.rollouts.errors import RolloutFailedError, RolloutFileError

OnError = Literal["raise", "return"]
_END_S = 30.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much there is at a time.

    Attributes:
        samples_per_prompt: Rollouts of each prompt.
        per_worker: Most rollouts that a worker has.
        in_flight: Most prompts that were pulled and not handed out.
    """

    samples_per_prompt: int
    per_worker: int
    in_flight: int


class Engine:
    """Pulls prompts while there is room, and notes those that are done.

    Args:
        calls: The workers.
        prompts: The stream.
        progress: Where what is done is noted.
        written: Ids of prompts that have a line in the file; None for no file.
        bounds: How much there is at a time.
        on_error: Whether a rollout that failed ends it all.
        wake: Set when something has changed.
        tally: Counts.
    """

    def __init__(
        self,
        calls: RolloutCalls,
        prompts: Prompts,
        progress: Progress,
        written: Collection[str] | None,
        bounds: Bounds,
        on_error: OnError,
        wake: threading.Event,
        tally: Tally,
    ) -> None:
        self._calls, self._prompts, self._progress, self._written = calls, prompts, progress, written
        self._bounds, self._on_error, self._wake, self.tally = bounds, on_error, wake, tally
        self._in_hand = self._recovered = len(progress)
        self._open, self._is_read = 0, False
        self._owed: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._is_over = self.is_finished = False
        self._thread = threading.Thread(target=self._run, name="raycrew-rollouts", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def is_stopped(self) -> bool:
        """Whether it was told to stop."""
        return self._stop.is_set()

    def stats(self) -> RolloutStats:
        """What has become of rollouts so far."""
        with self._lock:
            in_hand = self._in_hand
        return self.tally.stats(in_hand)

    def handed_out(self) -> None:
        """A prompt's rollouts were taken: there is room for another."""
        with self._lock:
            self._in_hand -= 1
        self.tally.count("handed_out")
        self._wake.set()

    def stop(self, wait_s: float = _END_S) -> None:
        """Give up what is under way; idempotent."""
        self._stop.set()
        self._wake.set()
        self._prompts.close()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(wait_s)

    def check_may_block(self) -> None:
        """See `Prompts`."""
        self._prompts.check_may_block()

    def finish(self) -> None:
        """All that was done was handed out; raise what has ended it, if it was not the end of the prompts."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if not self._is_over:
            raise WorkerGroupClosedError("the collection was closed before its end")
        self._check_owed(0)
        self.is_finished = True

    def _run(self) -> None:
        try:
            with Session.until_set(self._stop):
                self._roll_out()
            self._error, self._is_over = self._prompts.error, True
        except BaseException as error:  # noqa: BLE001 - raised to whoever collects
            if not self.is_stopped:
                self._error = error
        finally:
            self._prompts.close()
            with suppress(SampleQueueError):  # closed meanwhile, or its disk is full
                self._progress.end()

    def _roll_out(self) -> None:
        untried, per_worker = Untried(), self._bounds.per_worker
        stream = Stream(self._calls, untried, self._tasks(), _itself, per_worker, max_resends=inf)
        with closing(stream.pairs()) as pairs:
            for _, (task, outcome) in pairs:
                self._take(task, outcome)

    def _take(self, task: Task, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        self._open -= 1
        if outcome.kind is not None and self._on_error == "raise":
            raise failed(task, outcome)
        if not task.end(outcome):
            return
        prompt = task.prompt
        outcomes = [one for one in prompt.outcomes if one is not None]
        self._progress.add(Done(prompt.id, prompt.data, outcomes, prompt.attempts))
        n_failed = sum(one.kind is not None for one in outcomes)
        self.tally.end(prompt.id, len(outcomes) - n_failed, n_failed)

    def _tasks(self) -> Iterator[Any]:
        """All rollouts of all prompts that are not done; `LATER` while there is no room, or no prompt.

        Any that is under way may have to run once more, alone: so this ends with the last of them.
        """
        while (found := self._calls.next_alone() or self._next()) is not END or self._open:
            self._calls.is_source_late = found is LATER
            if found is LATER or found is END:
                yield LATER
            elif isinstance(found, Task):
                yield found
            else:
                yield from self._begun(found)
        self._calls.is_source_late = False

    def _begun(self, found: Identified) -> Iterator[Task]:
        n = self._bounds.samples_per_prompt
        self._open += n
        began = self.tally.begin(found.id)
        prompt = Prompt(found.id, found.data, began, [None] * n, [0] * n)
        for sample in range(n):
            yield Task(prompt, sample)

    def _next(self) -> Any:
        while not self._is_read and not self._is_full():
            found = self._prompts.next()
            self._is_read = found is END
            if found is LATER or found is END:
                return found
            self.tally.count("pulled")
            if not self._is_done(found.id):
                with self._lock:
                    self._in_hand += 1
                return found
            self.tally.count("skipped")
        return END if self._is_read else LATER

    def _is_done(self, prompt: str) -> bool:
        has_line = self._written is not None and prompt in self._written
        if not self._progress.has(prompt):
            return has_line
        if self._written is not None and not has_line:
            self._owed.add(prompt)  # that is, one of those that were not handed out
            self._check_owed(self._recovered)
        return True

    def _check_owed(self, most: int) -> None:
        lost = [prompt for prompt in self._owed if prompt not in (self._written or ())]
        if len(lost) > most:
            raise RolloutFileError(
                f"the folder says that prompt {lost[0]!r} is done, but the file has no line of it: it has "
                "lost lines, or is another file. Bring it back, or collect into another folder and file"
            )

    def _is_full(self) -> bool:
        Session.check_wanted()
        with self._lock:
            return self._in_hand >= self._bounds.in_flight


def failed(task: Task, outcome: Outcome) -> RolloutFailedError:
    """What is raised of a rollout."""
    how_often = "once" if task.attempts == 1 else f"{task.attempts} times, at last"
    message = f"rollout {task.sample} of prompt {task.prompt.id!r} failed {how_often}: {outcome.message}"
    details: dict[str, Any] = {"id": task.prompt.id, "sample": task.sample}
    return RolloutFailedError(message, **details, kind=outcome.kind, attempts=task.attempts)


def _itself(task: Any) -> Any:
    return task
