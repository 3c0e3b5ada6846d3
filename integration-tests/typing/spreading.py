"""What a type checker makes of calls on one worker, of handles and of fan_out: never run."""

from typing import Any, assert_type

from raycrew.worker_groups import (
    GroupHandle,
    ItemError,
    LoadBalancer,
    MultiWorkerFuture,
    RankInfo,
    RayWorkerGroup,
    Results,
    fan_out,
    replicated,
    sharded,
)


class Policy:
    """A worker."""

    def generate(self, prompt: str, *, n: int = 1) -> list[int]:
        return [len(prompt)] * n

    async def score(self, prompt: str) -> float:
        return float(len(prompt))

    @replicated
    def step(self, lr: float) -> float:
        return lr

    @sharded("dp", collect="mean")
    def length(self, rows: list[str]) -> int:
        return len(rows)

    @replicated(collect="mean")
    async def bytes_used(self) -> int:
        return 0

    @sharded("dp", collect="mean")
    def loss(self, rows: list[str]) -> float:
        return float(len(rows))


def one_worker_for_each_item(balancer: LoadBalancer, prompts: list[str]) -> None:
    assert_type(balancer.call(Policy.generate, "a", n=2, key=3), MultiWorkerFuture[list[int]])
    assert_type(balancer.call(Policy.score, "a", timeout=5).get_results(), list[float])
    assert_type(balancer.call(Policy.step, 0.1).get_results(), list[float])
    assert_type(balancer.call("generate", "a"), MultiWorkerFuture[Any])
    assert_type(balancer.map(Policy.generate, prompts, key=len), Results[list[int]])
    assert_type(balancer.map(Policy.score, prompts), Results[float])
    assert_type(balancer.map(Policy.step, [0.1, 0.2]), Results[float])
    assert_type(balancer.map("generate", prompts), Results[Any])
    assert_type(balancer.as_completed(Policy.score, prompts), Results[tuple[int, float]])
    balancer.map(Policy.generate, [1, 2])  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]


def means_of_integers_are_floats(group: RayWorkerGroup, rows: list[str]) -> None:
    assert_type(group.call(Policy.length, rows).get_results(), float)
    assert_type(group.call(Policy.bytes_used).get_results(), float)
    assert_type(group.call(Policy.loss, rows).get_results(), float)


def handles_are_called_as_groups_are(handle: GroupHandle, rows: list[str]) -> None:
    assert_type(handle.call(Policy.generate, "a").get_results(), list[list[int]])
    assert_type(handle.call(Policy.loss, rows).get_results(), float)
    assert_type(handle.balancer.map(Policy.score, rows), Results[float])


def halved(number: int) -> float:
    return number / 2


def work_that_is_spread(numbers: list[int]) -> None:
    assert_type(fan_out(halved, numbers), list[float])
    assert_type(fan_out(halved, numbers, on_error="raise"), list[float])
    assert_type(fan_out(halved, numbers, on_error="return"), list[float | ItemError])


def own(rank: RankInfo) -> dict[str, str]:
    return {"MINE": str(rank.rank)}


def arguments_of_each_rank(cluster: Any) -> None:
    RayWorkerGroup(cluster, Policy, init={"transport": "tcp"}, env_vars=own)
    RayWorkerGroup(cluster, Policy, init=own, launchers={"*": ["nsys", "profile"], "b": "numactl"})
