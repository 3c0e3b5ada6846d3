"""Asynchronous rollouts with a bound on staleness: `python examples/async_rollouts/run.py [--quick]`.

Generators sample without waiting for the trainer, and the trainer trains without waiting for all of them. New
weights go over by `sync_weights_async` meanwhile, and each row says which version made it. No row is trained
on that is more than `bound` versions old: generators wait before they would make one.
"""

import argparse
import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import one_hot

from raycrew.cluster_core import RayVirtualCluster, init_ray
from raycrew.tensor_transport import (
    BatchedDataDict,
    WeightDirectory,
    WeightPublisher,
    WeightReceipt,
    WeightReceiver,
    WeightUpdate,
    sync_weights_async,
)
from raycrew.worker_groups import RayWorkerGroup, current_worker, replicated

SYMBOLS, ROWS, ROWS_PER_STEP = 8, 64, 128


def logits_of(model: nn.Module, prompts: Tensor) -> Tensor:
    """What the policy makes of prompts: one symbol each, to be answered by the next one."""
    return cast("Tensor", model(one_hot(prompts, SYMBOLS).float()))


class Generator:
    """Samples with the weights that it has, and says which these are."""

    def __init__(self, directory: WeightDirectory) -> None:
        torch.set_num_threads(1)
        worker = current_worker()
        torch.manual_seed(worker.rank)
        self.model = nn.Linear(SYMBOLS, SYMBOLS)
        self.receiver = WeightReceiver(
            self._load, directory=directory, name=f"{worker.group_name} {worker.rank}", rollback="shadow"
        )

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        state = self.model.state_dict()
        for name, tensor in tensors:
            state[name].copy_(tensor)

    def prepare_weights(self, version: int) -> WeightReceipt:
        """Fetch a version; `sync_weights` calls this while the trainer still publishes."""
        return self.receiver.prepare(version)

    def apply_weights(self, version: int) -> WeightReceipt:
        """Load it."""
        return self.receiver.apply(version)

    @torch.no_grad()
    def generate(self, rows: int) -> BatchedDataDict:
        """Prompts, sampled answers, their log-probabilities and rewards, and the version of the weights."""
        prompts = torch.randint(SYMBOLS, (rows,))
        choices = logits_of(self.model, prompts).log_softmax(-1)
        answers = torch.multinomial(choices.exp(), 1)
        columns = {"prompts": prompts, "answers": answers, "logprobs": choices.gather(1, answers)[:, 0]}
        rewards = (answers[:, 0] == (prompts + 1) % SYMBOLS).float()
        return BatchedDataDict({**columns, "rewards": rewards, "versions": self.receiver.tag(rows)})


class Trainer:
    """Learns from rows of several versions, and publishes its weights."""

    def __init__(self, directory: WeightDirectory) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = nn.Linear(SYMBOLS, SYMBOLS)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.publisher = WeightPublisher(directory=directory)

    def publish_weights(self) -> WeightUpdate:
        """Put the weights where generators find them."""
        return self.publisher.publish(self.model.state_dict())

    @replicated
    def train(self, batch: BatchedDataDict) -> float:
        """One clipped policy-gradient step; gives the mean reward of the rows."""
        new = logits_of(self.model, batch["prompts"]).log_softmax(-1).gather(1, batch["answers"])[:, 0]
        ratio, gain = (new - batch["logprobs"]).exp(), batch["rewards"] - batch["rewards"].mean()
        loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        return float(batch["rewards"].mean())


@dataclass
class Rollouts:
    """Rows that are under way, and how many may be.

    Step k trains with weights of version k. Rows that are admitted while version v is the latest are at
    most `bound` versions old when used, if all rows admitted by then fit into the steps up to v + bound.
    Rows overtake one another: what is too old nevertheless is dropped and made anew.
    """

    bound: int
    version: int = 1
    admitted: int = 0
    dropped: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    ready: asyncio.Queue[BatchedDataDict] = field(default_factory=asyncio.Queue)

    async def produce(self, generators: RayWorkerGroup, rank: int) -> None:
        """Keep one generator busy for as long as rows may be admitted."""
        while True:
            async with self.changed:
                await self.changed.wait_for(self._has_room)
                self.admitted += ROWS
            (rows,) = await generators.on(ranks=[rank], timeout=120).call(Generator.generate, ROWS)
            await self.ready.put(rows)

    def _has_room(self) -> bool:
        return self.admitted + ROWS <= (self.version + self.bound) * ROWS_PER_STEP

    async def next_batch(self) -> BatchedDataDict:
        """Rows for one step, none of them too old."""
        parts: list[BatchedDataDict] = []
        while sum(part.size for part in parts) < ROWS_PER_STEP:
            rows = await self.ready.get()
            if self.version - int(rows["versions"].min()) <= self.bound:
                parts.append(rows)
            else:
                await self.note(self.version, rows.size)
        return BatchedDataDict.concat(parts)

    async def note(self, version: int, dropped: int = 0) -> None:
        """Rows may be admitted: there is a later version, or some were dropped."""
        async with self.changed:
            self.version = version
            self.dropped += dropped
            self.admitted -= dropped
            self.changed.notify_all()


@dataclass(frozen=True)
class Step:
    """Mean reward of a step's rows, and how old the oldest of them was."""

    reward: float
    staleness: int


async def run(cluster: RayVirtualCluster, steps: int, bound: int) -> list[Step]:
    """Train for some steps on the first bundle, and generate on all others meanwhile."""
    done, rollouts, directory = [], Rollouts(bound), WeightDirectory.start()
    first, *others = ([bundle.index] for bundle in cluster.bundles)
    start = partial(RayWorkerGroup.start, cluster, directory=directory)
    async with (
        await start(Trainer, bundle_indices_list=[first]) as trainer,
        await start(Generator, bundle_indices_list=others) as generators,
        asyncio.TaskGroup() as tasks,
    ):
        sync = partial(
            sync_weights_async, trainer, generators, directory=directory, prepare="prepare_weights"
        )
        await sync()
        under_way = [tasks.create_task(rollouts.produce(generators, rank)) for rank in range(len(others))]
        for _ in range(steps):
            batch = await rollouts.next_batch()
            staleness = rollouts.version - int(batch["versions"].min())
            done.append(Step(await trainer.call(Trainer.train, batch), staleness))
            await rollouts.note((await sync()).version)
        for task in under_way:
            task.cancel()
    return done


def main() -> None:
    """Read the options, run, and show the curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--bound", type=int, default=2, help="how many versions old a row may be (default: 2)"
    )
    parser.add_argument("--quick", action="store_true", help="4 steps, to see that everything works")
    options = parser.parse_args()
    with init_ray(num_cpus=4), RayVirtualCluster([3], use_gpus=False) as cluster:
        steps = asyncio.run(run(cluster, 4 if options.quick else 60, options.bound))
    for number, step in list(enumerate(steps))[:: max(1, len(steps) // 12)]:
        text = f"step {number:3}  staleness {step.staleness}  {step.reward:.2f}  "
        Console().print(text + "█" * round(40 * step.reward))


if __name__ == "__main__":
    main()
