"""What a type checker makes of calls on a group: read by the type checker, never run."""

from collections.abc import Iterator
from typing import Any, assert_type

from raycrew.worker_groups import MultiWorkerFuture, RayWorkerGroup, Results, sharded


class Policy:
    """A worker."""

    def step(self, batch: list[int], *, scale: float = 1.0) -> dict[str, float]:
        return {"loss": scale * sum(batch)}

    async def slow(self, x: int) -> int:
        return x

    @sharded("dp")
    def late(self, rows: list[int]) -> list[int]:
        return rows

    def its_own(self, timeout: str) -> str:
        return timeout

    def tokens(self, prompt: str) -> Iterator[int]:
        yield from map(ord, prompt)


def results_have_the_methods_type(group: RayWorkerGroup) -> None:
    assert_type(group.call(Policy.step, [1], scale=2.0), MultiWorkerFuture[dict[str, float]])
    assert_type(group.call(Policy.step, [1]).get_results(), list[dict[str, float]])
    assert_type(group.on(ranks=[0], timeout=60).call(Policy.step, [1]).get_results(), list[dict[str, float]])
    assert_type(group.on(leaders=True).call(Policy.step, [1]), MultiWorkerFuture[dict[str, float]])
    sharded = group.call_sharded(Policy.step, [[1], [2]], in_sharded_axes=["dp"])
    assert_type(sharded, MultiWorkerFuture[dict[str, float]])
    assert_type(group.stream(Policy.tokens, "abc"), Results[tuple[int, int]])
    assert_type(group.call("step", 1, timeout=5), MultiWorkerFuture[Any, Any])


def a_deadline_is_no_argument_of_the_method(group: RayWorkerGroup) -> None:
    assert_type(group.call(Policy.step, [1], timeout=60).get_results(), list[dict[str, float]])
    assert_type(group.call(Policy.slow, 1, timeout=None).get_results(), list[int])
    assert_type(group.call(Policy.late, [1], timeout=60).get_results(), list[int])
    assert_type(group.on(ranks=[0]).call(Policy.late, [1], timeout=60).get_results(), list[list[int]])
    assert_type(group.on(ranks=[0]).call(Policy.step, [1], timeout=60).get_results(), list[dict[str, float]])
    assert_type(group.stream(Policy.tokens, "abc", timeout=60), Results[tuple[int, int]])
    assert_type(group.run_rank_zero("step", [1], timeout=60).get_results(), list[Any])
    assert_type(group.call(Policy.its_own, timeout="soon").get_results(), list[str])
    group.call(Policy.step, [1], timeout="soon")  # type: ignore[arg-type, call-arg]


async def awaited_too(group: RayWorkerGroup) -> None:
    assert_type(await group.call(Policy.step, [1]), list[dict[str, float]])


def wrong_arguments_are_found(group: RayWorkerGroup) -> None:
    group.call(Policy.step)  # type: ignore[call-overload]
    group.call(Policy.step, "text")  # type: ignore[call-overload]
    group.call(Policy.step, [1], sclae=2.0)  # type: ignore[arg-type, call-arg]
    group.on(ranks=[0]).call(Policy.step, [1], scale="x")  # type: ignore[arg-type]
    group.stream(Policy.tokens, 3)  # type: ignore[call-overload]
