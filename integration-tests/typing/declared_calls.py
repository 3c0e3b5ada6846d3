"""What a type checker makes of calls on methods that say how they are called: never run."""

import statistics
from typing import Any, assert_type

import torch

from raycrew.tensor_transport import BatchedDataDict
from raycrew.worker_groups import (
    MultiWorkerFuture,
    RayWorkerGroup,
    per_rank,
    rank_zero,
    replicated,
    sharded,
    wait_any,
)
from raycrew.worker_groups.testing import InProcessGroup


def longest(texts: list[str]) -> int:
    return max(map(len, texts))


class Policy:
    """A worker."""

    @sharded("dp", pad=True)
    def logprobs(self, batch: BatchedDataDict, *, scale: float = 1.0) -> BatchedDataDict:
        return batch.slice(0, int(scale))

    @sharded("dp", split=["batch"], collect="list")
    def train(self, batch: BatchedDataDict, epochs: int) -> dict[str, float]:
        return {"epochs": float(epochs)}

    @sharded("dp", collect="mean")
    async def loss(self, batch: BatchedDataDict) -> torch.Tensor:
        return torch.ones(())

    @sharded("dp", collect=longest)
    def text(self, batch: BatchedDataDict) -> str:
        return ""

    @sharded("dp", collect=statistics.fmean)
    async def mean(self, batch: BatchedDataDict) -> float:
        return 1.0

    @replicated
    def step(self, lr: float) -> float:
        return lr

    @replicated(collect="list")
    def memory(self) -> int:
        return 0

    @rank_zero
    async def save(self, path: str) -> bool:
        return bool(path)

    @per_rank
    def seed(self, number: int) -> str:
        return str(number)

    @per_rank(split="number")
    def seed_with(self, number: int, salt: str) -> str:
        return f"{number}{salt}"

    async def locally(self, batch: BatchedDataDict) -> None:
        assert_type(self.logprobs(batch, scale=2.0), BatchedDataDict)
        assert_type(await self.loss(batch), torch.Tensor)
        assert_type(self.step(1.0), float)


def the_value_has_the_type_that_the_decorator_says(group: RayWorkerGroup, batch: BatchedDataDict) -> None:
    future = group.call(Policy.logprobs, batch, scale=2.0)
    assert_type(future, MultiWorkerFuture[BatchedDataDict, BatchedDataDict])
    assert_type(future.get_results(), BatchedDataDict)
    assert_type(dict(future.as_completed()), dict[int, BatchedDataDict])
    assert_type(group.get_all_worker_results(future), BatchedDataDict)
    assert_type(group.call(Policy.train, batch, 2).get_results(), list[dict[str, float]])
    assert_type(group.on(timeout=60).call(Policy.loss, batch).get_results(), torch.Tensor)
    assert_type(group.call(Policy.text, batch).get_results(), int)
    assert_type(group.call(Policy.mean, batch).get_results(), float)
    assert_type(group.call(Policy.step, 0.1).get_results(), float)
    assert_type(group.call(Policy.memory).get(), list[int])
    assert_type(group.call(Policy.save, "there").get_results(), bool)
    assert_type(group.call(Policy.seed, [1, 2]).get_results(), list[str])
    assert_type(group.call(Policy.seed_with, [1, 2], "salt").get_results(), list[str])
    wait_any([future, group.call(Policy.step, 0.1)])


async def awaited_too(group: InProcessGroup, batch: BatchedDataDict) -> None:
    assert_type(await group.call(Policy.logprobs, batch), BatchedDataDict)
    assert_type(await group.call(Policy.loss, batch), torch.Tensor)


def who_names_ranks_or_axes_gets_the_list(group: RayWorkerGroup, batch: BatchedDataDict) -> None:
    assert_type(group.on(ranks=[0]).call(Policy.logprobs, batch).get_results(), list[BatchedDataDict])
    assert_type(group.on(leaders=True).call(Policy.save, "there").get_results(), list[bool])
    by_axes = group.call_sharded(Policy.logprobs, [batch], in_sharded_axes=["dp"])
    assert_type(by_axes, MultiWorkerFuture[BatchedDataDict])
    assert_type(group.call("logprobs", batch).get_results(), Any)


def wrong_arguments_are_found(group: RayWorkerGroup, batch: BatchedDataDict) -> None:
    group.call(Policy.step, "fast")  # type: ignore[call-overload]
    group.call(Policy.train, batch)  # type: ignore[call-overload]
    group.call(Policy.logprobs, batch, sclae=2.0)  # type: ignore[call-arg]
