"""The loop in which generators do not wait for the trainer, nor the trainer for them, but for samples."""

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from statistics import fmean

import torch

from grpo.admission import Admission
from grpo.completions import completions_of
from grpo.config import RunConfig
from grpo.crew import Crew, split
from grpo.errors import ExampleError
from grpo.history import OVERLAPPED, Evaluation, History, StepRecord
from grpo.loop import GREEDY, SAMPLED
from grpo.objective import group_advantages
from grpo.occupancy import Occupancy
from grpo.task import SortingTask
from grpo.verification import rewards
from raycrew.tensor_transport import BatchedDataDict
from raycrew.worker_groups import SampleBatch, SampleQueue, SampleQueueTimeoutError

Asked = tuple[Sequence[str], Awaitable[list[BatchedDataDict]]]
"""Prompts, and what one generator will have sampled from them."""
TEXTS = ("prompts", "completions")
PATIENCE_S = 1.0
"""After so long without enough samples it is asked whether some were dropped, which are to be replaced."""
A_DAY_S = 86_400.0
"""How long samples are whose took them: a round takes as long as it does, and nobody else takes any."""


class AsyncGrpoLoop:
    """Trains a policy group with what a generation group samples meanwhile, at most some versions before.

    A sample of the queue is a prompt with all its completions, whose rewards are normalised together.
    Generators put them, the verifier adds their rewards, the trainer takes them, each once.

    Args:
        config: The run's configuration.
        crew: The two groups.
        max_staleness: How many versions older than the policy the weights may be that a sample was made with.
    """

    def __init__(self, config: RunConfig, crew: Crew, max_staleness: int) -> None:
        self.config, self.crew, self.max_staleness = config, crew, max_staleness
        self.history = History(events=crew.deaths.events, phases=OVERLAPPED)
        task = SortingTask(config.digits, config.seed)
        self.train_prompts, held_out = task.split()
        self.held_out = held_out[: config.grpo.held_out_prompts]
        self.prompts = (prompt for round_ in task.rounds(self.train_prompts, 1) for prompt in round_)
        self.queue = SampleQueue(["samples", "reward"], name="prompts", stale="drop", lease_s=A_DAY_S)
        self.admission = Admission(
            max_staleness,
            config.grpo.prompts_per_step,
            config.grpo.steps,
            dropped=lambda: self.queue.stats().dropped,
        )
        self.trained: Counter[int] = Counter()
        """Numbers of the samples that were learnt from, and how often."""
        self.trainer = Occupancy()
        self.generators = [Occupancy() for _ in crew.generators.leaders]
        self._seconds: dict[str, float] = {}
        self._evaluating: asyncio.Task[None] | None = None
        self._measured = 0
        """After how many rounds a measurement was begun last."""
        self._shared: dict[int, int] = {}
        """Versions that reached all generators, that of the start and one after each round, and how many
        rounds each has learnt from: perhaps one more than it came after, where its update was done again."""

    def run(self, update: Callable[[], None]) -> History:
        """All rounds, with the held-out reward measured before, in between and after; `update` shows each."""
        asyncio.run(self._run(update))
        return self.history

    def counts(self) -> dict[str, int]:
        """What has become of the prompts that generators were asked for."""
        stats = self.queue.stats()
        return {
            "produced": stats.produced,
            "trained": stats.consumed,
            "dropped as too old": stats.dropped,
            "left over": stats.held,
        }

    def busy_s(self) -> dict[str, float]:
        """For how long the trainer had something to do, and a generator on average."""
        generators = [generator.busy_s for generator in self.generators]
        return {"trainer": self.trainer.busy_s, "generators": sum(generators) / len(generators)}

    def close(self) -> None:
        """Hold no samples any more."""
        self.queue.close()

    async def _run(self, update: Callable[[], None]) -> None:
        version, _ = await self._share(asyncio.Event())
        await self._evaluate(0, self._ask_held_out(), version, update)
        self.generators[:] = [Occupancy() for _ in self.generators]  # from here on it is measured
        try:
            async with asyncio.TaskGroup() as tasks:
                ranks = range(len(self.generators))
                working = [tasks.create_task(self._generate(rank)) for rank in ranks]
                working.append(tasks.create_task(self._verify()))
                await self._learn(tasks, update)
                for task in working:
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _generate(self, rank: int) -> None:
        """Keep one generator busy for as long as prompts are admitted."""
        share = -(-self.admission.per_round // len(self.generators))
        samples = self.config.grpo.samples_per_prompt
        while True:
            n = await self.admission.admit(share)
            prompts, seed = list(islice(self.prompts, n)), self.admission.asked
            with self.generators[rank].call():
                (sampled,) = await self.crew.ask_generator(rank, prompts, samples, SAMPLED, seed)
            batch = completions_of(prompts, sampled)
            made_for = self._round_of(int(batch["weight_version"].min()))
            await self.queue.put_async({"samples": batch.shard(n)}, version=made_for)

    async def _verify(self) -> None:
        """Add the rewards of whatever there is."""
        while True:
            batch = await self.queue.get_async(
                self.admission.per_round, columns=["samples"], adds=["reward"], at_least=1
            )
            found = await asyncio.to_thread(_rewards, batch["samples"])
            await batch.add_async({"reward": found})

    def _round_of(self, version: int) -> int:
        """Which round would learn with these weights; perhaps an earlier one, where not all have got them."""
        return 1 + self._shared.get(version, bisect_left(list(self._shared), version))

    async def _learn(self, tasks: asyncio.TaskGroup, update: Callable[[], None]) -> None:
        """All rounds of training; new weights go to the generators while the next round trains.

        Args:
            tasks: Runs what goes on meanwhile.
            update: Called after each round.
        """
        sharing: asyncio.Task[None] | None = None
        for step in range(1, self.config.grpo.steps + 1):
            self._seconds = dict.fromkeys(OVERLAPPED, 0.0)
            with self._phase("wait"):
                taken = await self._next_prompts()
            batch = self._with_advantages(taken)
            with self._phase("train"), self.trainer.call():
                metrics = await self.crew.train_async(batch, step)
            await taken.done_async()
            self.trained.update(taken.ids)
            if sharing is not None:
                with self._phase("wait"):
                    await sharing
            self.queue.advance(step + 1)
            published = asyncio.Event()
            sharing = tasks.create_task(self._update(step, published, tasks, update))
            with self._phase("sync"), self.trainer.call():
                await published.wait()
            self.history.steps.append(
                StepRecord(
                    step=step,
                    reward=batch["reward"].mean().item(),
                    weight_version=step - max(taken.versions_behind),
                    tokens=int(batch["mask"].sum()),
                    seconds=self._seconds,
                    staleness=taken.versions_behind,
                    **metrics,
                )
            )
            update()

    def _with_advantages(self, taken: SampleBatch) -> BatchedDataDict:
        batch = BatchedDataDict.from_batches(taken["samples"])
        batch["reward"] = torch.tensor(taken["reward"]).flatten()
        batch["advantages"] = group_advantages(batch["reward"], self.config.grpo.samples_per_prompt)
        return batch

    async def _next_prompts(self) -> SampleBatch:
        """What the next round learns from, none of it too old."""
        size, oldest = self.admission.per_round, self.max_staleness
        while True:
            try:
                return await self.queue.get_async(size, max_staleness=oldest, timeout_s=PATIENCE_S)
            except SampleQueueTimeoutError:
                await self.admission.note()

    async def _update(
        self, step: int, published: asyncio.Event, tasks: asyncio.TaskGroup, update: Callable[[], None]
    ) -> None:
        """Bring the generators to what was learnt in a round, or by now."""
        version, learnt = await self._share(published)
        is_due = step % self.config.grpo.evaluate_every == 0 or step == self.config.grpo.steps
        if is_due and learnt > self._measured:
            self._measured = learnt
            asked = self._ask_held_out()  # before they get other weights
            evaluating = self._evaluate(learnt, asked, version, update, self._evaluating)
            self._evaluating = tasks.create_task(evaluating)
        await self.admission.note(learnt + 1)

    async def _share(self, published: asyncio.Event) -> tuple[int, int]:
        with ExitStack() as calls:
            for generator in self.generators:
                calls.enter_context(generator.call())
            version, learnt = await self.crew.share(published)
        self._shared[version] = learnt
        return version, learnt

    def _ask_held_out(self) -> list[Asked]:
        shares = split(self.held_out, len(self.generators))
        return [
            (share, self.crew.ask_generator(rank, share, 1, GREEDY, 0)) for rank, share in enumerate(shares)
        ]

    async def _evaluate(
        self,
        step: int,
        asked: Sequence[Asked],
        version: int,
        update: Callable[[], None],
        before: Awaitable[None] | None = None,
    ) -> None:
        """Measure the reward on held-out prompts, of just this version; told of after the one before."""
        with ExitStack() as calls:
            for generator in self.generators:
                calls.enter_context(generator.call())
            batches = [completions_of(prompts, *await answer) for prompts, answer in asked]
        held = min(int(batch["weight_version"].min()) for batch in batches)
        if held < version:  # newer are those of a generator that died and was asked again
            raise ExampleError(f"generators were measured with version {held}, not with {version}")
        found = await asyncio.to_thread(_rewards, batches)
        if before is not None:
            await before
        self.history.evaluations.append(Evaluation(step, fmean(chain.from_iterable(found))))
        update()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - start


def _rewards(batches: Sequence[BatchedDataDict]) -> list[list[float]]:
    """The reward of each completion, batch by batch."""
    found = iter(rewards(*([text for batch in batches for text in batch[key]] for key in TEXTS)))
    return [list(islice(found, batch.size)) for batch in batches]
