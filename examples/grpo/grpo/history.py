"""What a run measured: one record per step, and the held-out reward every few steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

PHASES = ("generate", "verify", "train", "sync")
"""What a round in turns consists of."""
OVERLAPPED = ("wait", "train", "sync")
"""What the trainer's round consists of where generators do not wait for it: it waits for samples."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One round of GRPO.

    Attributes:
        step: Counts from 1.
        reward: Mean reward of the round's completions, sampled at temperature 1.
        kl: Mean divergence from the reference, in nats per token.
        loss: The GRPO loss.
        clipped: Share of tokens whose probability ratio left the clip range.
        logprob_difference: Largest difference between the generator's log-probability of a sampled token
            and the trainer's own, before the round's learning.
        weight_version: What the generators reported to have sampled with, the oldest.
        tokens: Of the round's completions.
        seconds: Wall time of each phase.
        staleness: How many versions older that was than the policy, prompt by prompt, where it may be.
    """

    step: int
    reward: float
    kl: float
    loss: float
    clipped: float
    logprob_difference: float
    weight_version: int
    tokens: int
    seconds: dict[str, float]
    staleness: list[int] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the time that generating took, or over the whole round's."""
        return self.tokens / max(self.seconds.get("generate", sum(self.seconds.values())), 1e-9)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward on held-out prompts, decoded greedily, after `step` rounds."""

    step: int
    reward: float


@dataclass(frozen=True, slots=True)
class Event:
    """A worker that died, and was replaced.

    Attributes:
        step: In which round; 0 before the first.
        worker: Its group and rank.
        seconds: From when its death was seen until what it had been asked for was done.
        what: All that in one line.
    """

    step: int
    worker: str
    seconds: float
    what: str


@dataclass(slots=True)
class History:
    """Everything that a run measured so far, and what happened to it."""

    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    phases: Sequence[str] = PHASES

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The history of which `asdict` made this."""
        return cls(
            [StepRecord(**step) for step in content["steps"]],
            [Evaluation(**evaluation) for evaluation in content["evaluations"]],
            [Event(**event) for event in content["events"]],
        )

    def go_back_to(self, earlier: "History") -> None:
        """Forget what was measured since; not what happened."""
        self.steps[:], self.evaluations[:] = earlier.steps, earlier.evaluations
        self.events[:] = [*earlier.events, *(e for e in self.events if e not in earlier.events)]

    @property
    def summary(self) -> str:
        """The run in one line."""
        first, last = self.evaluations[0], self.evaluations[-1]
        return f"held-out reward {first.reward:.2f} -> {last.reward:.2f}"

    def time_split(self) -> str:
        """The share of each phase in the time of all steps, in one line."""
        totals = self.phase_totals()
        whole = max(sum(totals.values()), 1e-9)
        shares = ", ".join(f"{phase} {seconds / whole:.0%}" for phase, seconds in totals.items())
        return f"{len(self.steps)} steps in {whole:.0f} s: {shares}"

    def phase_totals(self) -> dict[str, float]:
        """Seconds that each phase took over all steps."""
        return {phase: sum(step.seconds[phase] for step in self.steps) for phase in self.phases}
