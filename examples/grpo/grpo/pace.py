"""How a run goes by the clock, for comparing one kind of loop with another."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from grpo.history import History

REACHED = 0.9


@dataclass(frozen=True, slots=True)
class Pace:
    """A run's rounds by the clock, from the first measurement on held-out prompts to the last.

    Attributes:
        name: What kind of loop it was.
        wall_s: How long all rounds took, measurements among them.
        samples: Completions that were learnt from.
        rewards: Seconds since the start, and the held-out reward that was measured then.
        idle: Share of that time in which there was nothing to do for the trainer, and for a generator.
        staleness: How many prompts were learnt from that were so many versions old.
        counts: What became of all prompts.
    """

    name: str
    wall_s: float
    samples: int
    rewards: list[tuple[float, float]]
    idle: Mapping[str, float]
    staleness: Mapping[int, int]
    counts: Mapping[str, int]

    @property
    def samples_per_s(self) -> float:
        """Completions that were learnt from, by the clock."""
        return self.samples / self.wall_s

    @property
    def mean_staleness(self) -> float:
        """How many versions old a sample was, on average, when it was learnt from."""
        return sum(age * n for age, n in self.staleness.items()) / sum(self.staleness.values())

    def seconds_to(self, reward: float) -> float | None:
        """When the held-out reward was first seen to be as high as this; None for never."""
        return next((at for at, found in self.rewards if found >= reward), None)

    def as_dict(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "samples_per_s": self.samples_per_s}


@dataclass(slots=True)
class Stopwatch:
    """Notes when each held-out reward was measured: what a loop calls as its `update`.

    Attributes:
        history: Of the loop.
        then: Called after that.
        rewards: See `Pace`.
    """

    history: History
    then: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    rewards: list[tuple[float, float]] = field(default_factory=list)
    started: float | None = None

    def __call__(self) -> None:
        """The history has grown."""
        if self.started is None:
            self.started = self.clock()
        for evaluation in self.history.evaluations[len(self.rewards) :]:
            self.rewards.append((self.clock() - self.started, evaluation.reward))
        self.then()

    @property
    def wall_s(self) -> float:
        """From the first measurement to the last."""
        return self.rewards[-1][0]


def behind(bound: int) -> str:
    """How old samples may be, in words."""
    return f"at most {bound} version{'s' * (bound != 1)} behind"


def in_turns(watch: Stopwatch, prompts_per_step: int, samples_per_prompt: int) -> Pace:
    """The pace of a loop that generates, verifies, trains and synchronises in turns."""
    history, wall = watch.history, watch.wall_s
    took, prompts = history.phase_totals(), len(history.steps) * prompts_per_step
    measuring = wall - sum(took.values())
    busy = {"trainer": took["train"], "generators": took["generate"] + measuring}
    return Pace(
        "in turns",
        wall,
        prompts * samples_per_prompt,
        watch.rewards,
        {who: 1 - (seconds + took["sync"]) / wall for who, seconds in busy.items()},
        {0: prompts},
        {"produced": prompts, "trained": prompts, "dropped as too old": 0, "left over": 0},
    )


def overlapped(
    watch: Stopwatch,
    bound: int,
    samples_per_prompt: int,
    busy_s: Mapping[str, float],
    counts: Mapping[str, int],
) -> Pace:
    """The pace of a loop in which generation goes on while the trainer trains."""
    history, wall = watch.history, watch.wall_s
    staleness = Counter(age for step in history.steps for age in step.staleness)
    return Pace(
        behind(bound),
        wall,
        staleness.total() * samples_per_prompt,
        watch.rewards,
        {who: 1 - seconds / wall for who, seconds in busy_s.items()},
        dict(sorted(staleness.items())),
        counts,
    )


def comparison(paces: list[Pace]) -> Table:
    """Kinds of loops side by side, for people."""
    table = Table(box=None, header_style="bold", padding=(0, 2))
    table.add_column("")
    for pace in paces:
        table.add_column(pace.name, justify="right")
    rows: dict[str, Callable[[Pace], str]] = {
        "rounds, in s": lambda pace: f"{pace.wall_s:.1f}",
        "completions/s": lambda pace: f"{pace.samples_per_s:,.0f}",
        "held-out reward": lambda pace: f"{pace.rewards[-1][1]:.2f}",
        f"s to held-out {REACHED}": lambda pace: _seconds(pace.seconds_to(REACHED)),
        "trainer idle": lambda pace: f"{pace.idle['trainer']:.0%}",
        "generators idle": lambda pace: f"{pace.idle['generators']:.0%}",
        "versions behind, mean": lambda pace: f"{pace.mean_staleness:.2f}",
    }
    for what, cell in rows.items():
        table.add_row(what, *map(cell, paces))
    for what in paces[0].counts:
        table.add_row(f"prompts {what}", *(f"{pace.counts[what]:,}" for pace in paces))
    return table


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"
