"""The two groups of workers and what the driver has them do; what dies is replaced, and asked again."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import pairwise
from typing import Any

from generation import Generators, Sampling
from grpo.completions import completions_of, prompts_of
from grpo.config import RunConfig
from grpo.deaths import Deaths
from grpo.errors import ExampleError
from raycrew.tensor_transport import (
    BatchedDataDict,
    SyncProgress,
    WeightDirectory,
    WeightSyncReport,
    WeightUpdateError,
    sync_weights,
    sync_weights_async,
)
from raycrew.worker_groups import MultiWorkerFuture, PhaseManager, RayWorkerGroup, WorkerFailureError

DATA = ("data",)


class Crew:
    """A policy that learns, and generators that sample from it.

    Args:
        config: The run's configuration.
        policy: Workers of the kind `grpo.policy.PolicyWorker`.
        generators: Replicas of a generator.
        directory: Where the policy's versions are, for both groups.
        deaths: Both groups tell it of their workers' deaths.
        phases: Whose turn it is, where the two share a device of which each wants all: whoever is not at work
            sleeps. None where both are awake all the time.

    Attributes:
        on_update: Told of each update of the generators, with what each rank did when.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: RayWorkerGroup,
        generators: Generators,
        directory: WeightDirectory,
        deaths: Deaths,
        phases: PhaseManager | None = None,
    ) -> None:
        self.on_update: Callable[[WeightSyncReport], object] = lambda _: None
        self.phases = phases
        self.config, self.policy, self.generators = config, policy, generators
        self.directory, self.deaths = directory, deaths
        self.done = 0
        """How many rounds the policy has learnt from, as far as the driver knows."""
        self._held = self._before = self._deaths_met = 0
        self._between_rounds = asyncio.Lock()

    @property
    def version(self) -> int:
        """Of the weights that the generators hold; it goes on where that of a resumed run ended."""
        return self._before + self._held

    def warm_up(
        self, prompts: Sequence[str], progress: Callable[[int, float], None], chunk: int = 50
    ) -> float:
        """Teach the policy the form of an answer; report (steps done, loss) now and then; the last loss."""
        shares = split(prompts, len(self.policy.ranks))
        loss, total = 0.0, self.config.warmup.steps
        for start in range(0, total, chunk):
            how = {"start": start, "steps": min(chunk, total - start)}
            with self._turn("policy"):
                losses = self.policy.run_all_workers_sharded_data(
                    "warm_up", prompts=shares, common_kwargs=how, in_sharded_axes=DATA
                )
                loss = losses.get_results()[0]
            self.deaths.tell(0, "with what the other ranks had learnt")
            progress(start + how["steps"], loss)
        return loss

    def generate(
        self, prompts: Sequence[str], samples: int, temperature: float, seed: int, step: int
    ) -> BatchedDataDict:
        """Completions of all prompts, each generator taking its share of them; their weights are checked."""
        how = self._sampling(samples, temperature, seed)
        with self._turn("generator"):
            with self.deaths.strike(self.generators.group, step):
                parts = self.generators.begin(prompts_of(prompts), how)
            samples = BatchedDataDict.from_batches(parts.get_results())
        batch = completions_of(prompts, samples)
        held = set(batch["weight_version"].tolist())
        if held != {self._held}:
            raise ExampleError(f"generators sampled with weights {held}, not with version {self._held}")
        self.deaths.tell(step, f"caught up to version {self.version}")
        return batch

    def ask_generator(
        self, rank: int, prompts: Sequence[str], samples: int, temperature: float, seed: int
    ) -> MultiWorkerFuture[Any, list[BatchedDataDict]]:
        """Have one generator sample from prompts, with the weights that it has by then."""
        how = self._sampling(samples, temperature, seed)
        return self.generators.group.on(ranks=[rank]).call("generate", prompts_of(prompts), how)

    def train(self, batch: BatchedDataDict, step: int) -> dict[str, float]:
        """One round's learning, the batch sharded over the policy's ranks."""
        with self._turn("policy"):
            with self.deaths.strike(self.policy, step):
                done = self._ask_policy(batch, step)
            metrics = done.get_results()[0]
        return self._has_learnt(metrics, step)

    async def train_async(self, batch: BatchedDataDict, step: int) -> dict[str, float]:
        """As `train`, without blocking the event loop."""
        async with self._between_rounds:
            return self._has_learnt((await self._ask_policy(batch, step))[0], step)

    def _ask_policy(
        self, batch: BatchedDataDict, step: int
    ) -> MultiWorkerFuture[Any, list[dict[str, float]]]:
        columns = ("tokens", "mask", "logprobs", "advantages")
        shards = BatchedDataDict({key: batch[key] for key in columns}).shard(len(self.policy.ranks))
        return self.policy.run_all_workers_sharded_data(
            "train", batch=shards, common_kwargs={"step": step}, in_sharded_axes=DATA
        )

    def _has_learnt(self, metrics: dict[str, float], step: int) -> dict[str, float]:
        self.done = step
        self.deaths.tell(step, f"caught up to round {step} from the other ranks")
        return metrics

    def synchronise(self) -> None:
        """Bring every generator to the policy's weights, or none; what they report is that version.

        If a worker died meanwhile, and is back, it is done again.
        """
        while True:
            try:
                version = self._hand_on()
            except (WorkerFailureError, WeightUpdateError):
                if not self._may_repeat():
                    raise
            else:
                self._held = version
                self.deaths.tell(self.done, f"caught up to version {self.version}")
                return

    def _hand_on(self) -> int:
        """Have the generators take the policy's weights now, or, where they sleep, when they are woken."""
        if self.phases is None:
            report = sync_weights(self.policy, self.generators.group, directory=self.directory)
            self.on_update(report)
            return report.version
        with self._turn("policy"):
            update = self.policy.on(ranks=[0]).call("publish_weights").get_results()[0]
        return int(update.version)

    def _turn(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.phases is None else self.phases.turn(name)

    async def share(self, published: asyncio.Event) -> tuple[int, int]:
        """As `synchronise`, without blocking the event loop.

        Args:
            published: Set once the policy may go on learning, perhaps before the generators have loaded.

        Returns:
            The version, and how many rounds its weights have learnt from: perhaps one more than when it
            began, where it was done again.
        """
        while True:
            try:
                report, learnt = await self._share_once(published)
            except (WorkerFailureError, WeightUpdateError):
                if not await asyncio.to_thread(self._may_repeat):
                    raise
            else:
                self._held = report.version
                published.set()
                self.on_update(report)
                self.deaths.tell(self.done, f"caught up to version {self.version}")
                return report.version, learnt

    async def _share_once(self, published: asyncio.Event) -> tuple[WeightSyncReport, int]:
        loop = asyncio.get_running_loop()
        with ExitStack() as alone:
            await self._between_rounds.acquire()  # where it is done again, the next round may be under way
            alone.callback(self._between_rounds.release)
            learnt = self.done

            def go_on() -> None:
                alone.close()
                published.set()

            def progress(now: SyncProgress) -> None:
                if now.phase == "publish" and now.done == now.total:
                    loop.call_soon_threadsafe(go_on)

            report = await sync_weights_async(
                self.policy,
                self.generators.group,
                directory=self.directory,
                prepare="prepare_weights",
                progress=progress,
            )
            return report, learnt

    def _may_repeat(self) -> bool:
        """Whether an update that failed may do better now, as somebody has died since one failed last.

        Not since this one began: another call may have seen that death before, and this its traces alone.
        """
        before, self._deaths_met = self._deaths_met, self.deaths.count
        return before < self._deaths_met and not self.has_lost()

    def has_lost(self) -> bool:
        """Whether the policy has forgotten what it had learnt, as none of its ranks survived."""
        found: list[int] = self.policy.on(ranks=[0]).call("done").get_results()[0]
        return found < [self.config.warmup.steps, self.done]

    def state(self) -> dict[str, Any]:
        """What the policy has learnt."""
        found: dict[str, Any] = self.policy.on(ranks=[0]).call("state").get_results()[0]
        return found

    def restore(self, state: Any, done: int, version: int) -> None:
        """Bring both groups to where they were after some rounds."""
        with self._turn("policy"):
            self.policy.call("restore", state).get_results()
        self.done = done
        self.synchronise()
        self._before = version - self._held

    def _sampling(self, samples: int, temperature: float, seed: int) -> Sampling:
        return Sampling(
            n=samples,
            temperature=temperature,
            max_tokens=self.config.digits + 1,
            seed=self.config.seed * 1_000_003 + seed,
        )


def split(items: Sequence[str], parts: int) -> list[Sequence[str]]:
    """Consecutive parts whose sizes differ by at most one."""
    size, rest = divmod(len(items), parts)
    starts = [part * size + min(part, rest) for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(starts)]
