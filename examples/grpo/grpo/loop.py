"""The single-controller loop: one driver tells two groups of workers what to do, step by step."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from grpo.checkpoint import Checkpoint
from grpo.config import RunConfig
from grpo.crew import Crew
from grpo.history import Evaluation, History, StepRecord
from grpo.objective import group_advantages
from grpo.task import SortingTask
from grpo.verification import rewards
from raycrew.tensor_transport import WeightUpdateError
from raycrew.worker_groups import WorkerFailureError

GREEDY, SAMPLED = 0.0, 1.0


class GrpoLoop:
    """Trains a policy group with what a generation group samples from it.

    Args:
        config: The run's configuration.
        crew: The two groups.
        folder: Where checkpoints are written.
        settings: What a checkpoint has to be of.
        checkpoint_every: Rounds between two checkpoints; None for none at all.
    """

    def __init__(
        self,
        config: RunConfig,
        crew: Crew,
        folder: Path,
        settings: Mapping[str, Any],
        checkpoint_every: int | None,
    ) -> None:
        self.config, self.crew = config, crew
        self.folder, self.settings, self.checkpoint_every = folder, settings, checkpoint_every
        self.history = History(events=crew.deaths.events)
        self.task = SortingTask(config.digits, config.seed)
        self.train_prompts, held_out = self.task.split()
        self.held_out = held_out[: config.grpo.held_out_prompts]
        self.rounds = self._rounds_after(0)
        self._seconds: dict[str, float] = {}
        self._has_checkpoint = False  # There may be one of another run.

    def warm_up(self, progress: Callable[[int, float], None]) -> float:
        """Teach the policy the form of an answer; report (steps done, loss) now and then; the last loss."""
        return self.crew.warm_up(self.train_prompts, progress)

    def run(self, update: Callable[[], None]) -> History:
        """All rounds, with the held-out reward measured before, in between and after; `update` shows each.

        If no rank of the policy survives, it goes back to the last checkpoint.
        """
        while not (measured := self.history.evaluations) or measured[-1].step < self.config.grpo.steps:
            try:
                self.advance()
            except (WorkerFailureError, WeightUpdateError):
                if not (self._has_checkpoint and self.crew.has_lost()):
                    raise
                checkpoint = Checkpoint.load(self.folder)
                self.crew.deaths.tell(self.step + 1, f"gone back to the checkpoint of step {checkpoint.step}")
                self.restore(checkpoint)
            update()
        return self.history

    @property
    def step(self) -> int:
        """How many rounds are done."""
        return len(self.history.steps)

    def advance(self) -> None:
        """One round, or what comes before the first; after the last, the measurement if that is missing."""
        if not self.history.evaluations:
            self.crew.synchronise()
        elif self.step < self.config.grpo.steps:
            self.history.steps.append(self.round(self.step + 1, next(self.rounds)))
        if self._is_due(self.config.grpo.evaluate_every):
            self.evaluate(self.step)
        if self.checkpoint_every is not None and self._is_due(self.checkpoint_every):
            self.save()

    def round(self, step: int, prompts: Sequence[str]) -> StepRecord:
        """Generate, verify, train, synchronise."""
        self._seconds = {}
        config, version = self.config.grpo, self.crew.version
        with self._phase("generate"):
            batch = self.crew.generate(prompts, config.samples_per_prompt, SAMPLED, step, step)
        with self._phase("verify"):
            reward = torch.tensor(rewards(batch["prompts"], batch["completions"]))
        with self._phase("train"):
            batch["advantages"] = group_advantages(reward, config.samples_per_prompt)
            metrics = self.crew.train(batch, step)
        with self._phase("sync"):
            if self.config.synchronise:
                self.crew.synchronise()
        return StepRecord(
            step=step,
            reward=reward.mean().item(),
            weight_version=version,
            tokens=int(batch["mask"].sum()),
            seconds=self._seconds,
            **metrics,
        )

    def evaluate(self, step: int) -> None:
        """Measure the reward on held-out prompts."""
        batch = self.crew.generate(self.held_out, 1, GREEDY, 0, step)
        reward = rewards(batch["prompts"], batch["completions"])
        self.history.evaluations.append(Evaluation(step, sum(reward) / len(reward)))

    def save(self) -> None:
        """Write a checkpoint in place of the one before."""
        Checkpoint(self.settings, self.history, self.crew.version, self.crew.state()).save(self.folder)
        self._has_checkpoint = True

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint, of this run or of one that was stopped."""
        self.history.go_back_to(checkpoint.history)
        self.rounds = self._rounds_after(checkpoint.step)
        self.crew.restore(checkpoint.policy, checkpoint.step, checkpoint.version)
        self._has_checkpoint = True

    def _rounds_after(self, step: int) -> Iterator[Sequence[str]]:
        size = self.config.grpo.prompts_per_step
        return islice(self.task.rounds(self.train_prompts, size), step, None)

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step >= self.config.grpo.steps

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - start
