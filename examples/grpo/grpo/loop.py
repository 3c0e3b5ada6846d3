"""The single-controller loop: one driver tells two groups of workers what to do, step by step."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch

from grpo.config import RunConfig
from grpo.errors import ExampleError
from grpo.history import Evaluation, History, StepRecord
from grpo.objective import group_advantages
from grpo.task import SortingTask
from grpo.verification import rewards
from raycrew.tensor_transport import BatchedDataDict, sync_weights
from raycrew.worker_groups import RayWorkerGroup

GREEDY, SAMPLED = 0.0, 1.0
DATA = ("data",)


class GrpoLoop:
    """Trains a policy group with what a generation group samples from it.

    Args:
        config: The run's configuration.
        policy: Workers of the kind `grpo.policy.PolicyWorker`.
        generators: Workers of a kind that fits `grpo.generation.Generator`.
    """

    def __init__(self, config: RunConfig, policy: RayWorkerGroup, generators: RayWorkerGroup) -> None:
        self.config = config
        self.policy = policy
        self.generators = generators
        self.history = History()
        task = SortingTask(config.digits, config.seed)
        self.train_prompts, held_out = task.split()
        self.held_out = held_out[: config.grpo.held_out_prompts]
        self.rounds = task.rounds(self.train_prompts, config.grpo.prompts_per_step)
        self.version = 0
        self._seconds: dict[str, float] = {}

    def warm_up(self, progress: Callable[[int, float], None], chunk: int = 50) -> float:
        """Teach the policy the form of an answer; report (steps done, loss) now and then; the last loss."""
        shares = split(self.train_prompts, len(self.policy.ranks))
        for start in range(0, self.config.warmup.steps, chunk):
            steps = min(chunk, self.config.warmup.steps - start)
            losses = self.policy.run_all_workers_sharded_data(
                "warm_up", prompts=shares, common_kwargs={"steps": steps}, in_sharded_axes=DATA
            ).get_results()
            progress(start + steps, losses[0])
        self.policy.call("start_grpo").get_results()
        return losses[0]

    def run(self, update: Callable[[], None]) -> History:
        """All rounds, with the held-out reward measured before, in between and after; `update` shows each."""
        self.synchronise()
        self.evaluate(0)
        update()
        for step in range(1, self.config.grpo.steps + 1):
            self.history.steps.append(self.round(step, next(self.rounds)))
            if step % self.config.grpo.evaluate_every == 0 or step == self.config.grpo.steps:
                self.evaluate(step)
            update()
        return self.history

    def round(self, step: int, prompts: Sequence[str]) -> StepRecord:
        """Generate, verify, train, synchronise."""
        self._seconds = {}
        config = self.config.grpo
        with self._phase("generate"):
            batch = self.generate(prompts, config.samples_per_prompt, SAMPLED, step)
        with self._phase("verify"):
            reward = torch.tensor(rewards(batch["prompts"], batch["completions"]))
        with self._phase("train"):
            batch["advantages"] = group_advantages(reward, config.samples_per_prompt)
            metrics = self.train(batch)
        with self._phase("sync"):
            if self.config.synchronise:
                self.synchronise()
        return StepRecord(
            step=step,
            reward=reward.mean().item(),
            weight_version=int(batch["weight_version"].min()),
            tokens=int(batch["mask"].sum()),
            seconds=self._seconds,
            **metrics,
        )

    def generate(
        self, prompts: Sequence[str], samples: int, temperature: float, seed: int
    ) -> BatchedDataDict:
        """Completions of all prompts, each generator taking its share of them."""
        shares = split(prompts, len(self.generators.ranks))
        how = {"samples": samples, "temperature": temperature, "seed": self.config.seed * 1_000_003 + seed}
        parts = self.generators.run_all_workers_sharded_data(
            "generate", prompts=shares, common_kwargs=how, in_sharded_axes=DATA
        )
        batch = BatchedDataDict.from_batches(parts.get_results())
        versions = set(batch["weight_version"].tolist())
        if versions != {self.version}:
            raise ExampleError(f"generators sampled with weights {versions}, not with version {self.version}")
        return batch

    def train(self, batch: BatchedDataDict) -> dict[str, float]:
        """One round's learning, the batch sharded over the policy's ranks."""
        columns = ("tokens", "mask", "logprobs", "advantages")
        shards = BatchedDataDict({key: batch[key] for key in columns}).shard(len(self.policy.ranks))
        done = self.policy.run_all_workers_sharded_data("train", batch=shards, in_sharded_axes=DATA)
        return done.get_results()[0]

    def synchronise(self) -> None:
        """Bring every generator to the policy's weights; what they report is checked to be that version."""
        self.version = sync_weights(self.policy, self.generators).version

    def evaluate(self, step: int) -> None:
        """Measure the reward on held-out prompts."""
        batch = self.generate(self.held_out, 1, GREEDY, seed=0)
        reward = rewards(batch["prompts"], batch["completions"])
        self.history.evaluations.append(Evaluation(step, sum(reward) / len(reward)))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - start


def split(items: Sequence[str], parts: int) -> list[Sequence[str]]:
    """Consecutive parts whose sizes differ by at most one."""
    size, rest = divmod(len(items), parts)
    starts = [part * size + min(part, rest) for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(starts)]
