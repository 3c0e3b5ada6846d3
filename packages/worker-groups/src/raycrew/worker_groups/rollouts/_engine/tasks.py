"""Rollouts on their way: what was tried where, who may try again, and which prompts are complete. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raycrew.worker_groups.balancing import LeastOutstanding, WorkerLoad
from raycrew.worker_groups.rollouts._values import CurrentRollout, Outcome


@dataclass(eq=False, slots=True)
class Prompt:
    """A prompt whose rollouts are under way.

    Attributes:
        id: Its.
        data: It, pickled.
        began: When it was pulled, by the monotonic clock.
        outcomes: Of its rollouts, in order; None while there is none.
    """

    id: str
    data: bytes
    began: float
    outcomes: list[Outcome | None]
    attempts: list[int]

    @property
    def is_complete(self) -> bool:
        """Whether all have ended."""
        return None not in self.outcomes


@dataclass(eq=False, slots=True)
class Task:
    """One rollout.

    Attributes:
        prompt: Of which prompt.
        sample: Which of its rollouts.
        tried: Ranks that have failed it.
        attempts: How often it was tried and failed, those that were another's fault left out.
        is_suspect: Whether it was in a process that died, perhaps because of it.
        place: The worker that it is to go to next; None for any.
    """

    prompt: Prompt
    sample: int
    tried: set[int] = field(default_factory=set)
    attempts: int = 0
    is_suspect: bool = False
    place: int | None = None

    @property
    def which(self) -> CurrentRollout:
        """As its coroutine sees it."""
        return CurrentRollout(self.prompt.id, self.sample, self.attempts)

    def end(self, outcome: Outcome) -> bool:
        """Take what became of it; whether its prompt is complete now."""
        self.prompt.outcomes[self.sample] = outcome
        self.prompt.attempts[self.sample] = self.attempts
        return self.prompt.is_complete


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a rollout is tried again.

    Attributes:
        most: At most so often.
        of_errors: Whether also where the coroutine itself raised.
    """

    most: int
    of_errors: bool

    def allow(self, task: Task, outcome: Outcome) -> bool:
        """Whether a task that has failed so is tried again."""
        return task.attempts <= self.most and (outcome.kind != "raised" or self.of_errors)


class Untried:
    """The worker with the fewest rollouts among those that have not failed the one that is to be placed."""

    sticky = True
    needs_key = needs_usage = False

    def __init__(self) -> None:
        self._least = LeastOutstanding()

    def choose(self, loads: Sequence[WorkerLoad], key: Any) -> int:
        """Rank of one of `loads`; one that has failed the task only where there is no other."""
        if key.place is not None:
            return int(key.place)
        others = [load for load in loads if load.rank not in key.tried]
        return self._least.choose(others or loads, key)
