"""What a type checker makes of programs of coroutines: never run."""

import asyncio
from collections.abc import AsyncIterator
from typing import assert_type

from raycrew.cluster_core import Cluster
from raycrew.worker_groups import (
    ItemOutcome,
    MultiWorkerFuture,
    RayWorkerGroup,
    fan_out_as_completed,
    sharded,
    wait_any,
)
from raycrew.worker_groups.testing import InProcessGroup


class Policy:
    """A worker."""

    def step(self, x: int) -> float:
        return float(x)

    async def tokens(self, prompt: str) -> AsyncIterator[int]:
        yield len(prompt)

    @sharded("dp", collect="sum")
    def count(self, rows: list[int]) -> int:
        return len(rows)


def halved(number: int) -> float:
    return number / 2


async def groups_begin_with_the_arguments_of_their_class(cluster: Cluster) -> None:
    group = await RayWorkerGroup.start(cluster, Policy, max_restarts=1, secrets=["TOKEN"], own=1)
    assert_type(group, RayWorkerGroup)
    assert_type(await InProcessGroup.start(cluster, Policy), InProcessGroup)
    async with await RayWorkerGroup.start(cluster, Policy) as other:
        assert_type(other, RayWorkerGroup)
    assert_type(await group.ashutdown(), bool)
    await RayWorkerGroup.start()  # type: ignore[call-arg]
    await RayWorkerGroup.start(cluster, Policy, max_restarts="one")  # type: ignore[arg-type]


async def results_have_types_wherever_they_are_awaited(group: RayWorkerGroup) -> None:
    assert_type(await asyncio.create_task(group.call(Policy.step, 1)), list[float])
    assert_type(await asyncio.wait_for(group.call(Policy.count, [1]), 60), int)
    floats, number = await asyncio.gather(group.call(Policy.step, 1), group.call(Policy.count, [1]))
    assert_type((floats, number), tuple[list[float], int])
    async for rank_and_item in group.stream(Policy.tokens, "abc"):
        assert_type(rank_and_item, tuple[int, int])
    async for rank_and_result in group.call(Policy.step, 1).as_completed():
        assert_type(rank_and_result, tuple[int, float])
    async for result in group.balancer.map(Policy.step, [1, 2]):
        assert_type(result, float)
    async for outcome in fan_out_as_completed(halved, [1, 2]):
        assert_type(outcome, ItemOutcome[float])
        assert_type(outcome.value, float | None)


def the_first_of_several_is_what_they_are(group: RayWorkerGroup) -> None:
    ended = wait_any([group.call(Policy.step, 1), group.call(Policy.step, 2)])
    assert_type(ended, list[MultiWorkerFuture[float]])
