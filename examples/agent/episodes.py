"""Puzzles, and how an agent plays one: three turns with the tool, then an answer."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Self
from uuid import uuid4

from aiohttp import ClientSession

from raycrew.worker_groups import GroupHandle
from raycrew.worker_groups.rollouts import RolloutSample
from raycrew.worker_groups.services import Endpoint

PLACES, ASKED, TIMEOUT_S = 8, 3, 60.0
COLUMNS = ("seen", "chosen", "logprobs", "reward", "solved")


@dataclass(frozen=True)
class Puzzle:
    """A program that defines `f`, and the last place at which f is not above the limit."""

    program: str
    limit: int
    answer: int

    @classmethod
    def made(cls, chance: random.Random, *, is_held_out: bool = False) -> Self:
        """One of many; programs that are held out are not among the others."""
        a, b, answer = chance.randrange(1, 100), 2 * chance.randrange(50), chance.randrange(PLACES)
        b += is_held_out
        room = a * (answer + 1) ** 2 - a * answer**2
        return cls(f"def f(x): return {a} * x**2 + {b}", a * answer**2 + b + chance.randrange(room), answer)


class Agent:
    """What a worker of the pool has: the way to the policy, and to the tool."""

    def __init__(self, policies: GroupHandle, tool: Endpoint) -> None:
        self.policies, self.tool = policies, tool

    async def act(self, seen: tuple[int, int, int]) -> tuple[int, float, int]:
        """What the policy chooses; see `Generator`."""
        chosen: list[tuple[int, float, int]]
        chosen = await self.policies.balancer.call("act", seen, timeout=TIMEOUT_S)
        return chosen[0]

    @asynccontextmanager
    async def interpreter(self, program: str) -> AsyncIterator[Callable[[str], Awaitable[str]]]:
        """An interpreter of the tool's that has run a program; gives what evaluates expressions there."""
        headers = {**self.tool.headers, "X-Session": uuid4().hex}  # by which the proxy finds its server again
        async with ClientSession(self.tool.url, headers=headers, raise_for_status=True) as client:

            async def ask(method: str, program: str = "") -> str:
                async with client.request(method, "/session", json={"program": program}) as answer:
                    said = await answer.json()
                if said["error"]:
                    raise RuntimeError(f"{program!r}: {said['error']}")
                return str(said["value"])

            await ask("PUT", program)
            try:
                yield partial(ask, "POST")
            finally:
                await ask("DELETE")


async def play(agent: Agent, puzzle: Puzzle) -> RolloutSample:
    """An episode, of which the policy sees this: between which places the answer is, and which turn it is."""
    low, high, turns = 0, PLACES, []
    async with agent.interpreter(puzzle.program) as run:
        for turn in range(ASKED):
            turns.append(((low, high, turn), *await agent.act((low, high, turn))))
            place = turns[-1][1]
            is_below = await run(f"f({place}) <= {puzzle.limit}") == "True"
            low, high = (max(low, place), high) if is_below else (low, min(high, place))
    turns.append(((low, high, ASKED), *await agent.act((low, high, ASKED))))
    seen, chosen, logprobs, versions = zip(*turns, strict=True)
    # The chance that the answer is right, as far as anybody can know: less noisy than whether it is.
    reward = (low <= chosen[-1] < high) / (high - low)
    values = (seen, chosen, logprobs, reward, float(chosen[-1] == puzzle.answer))
    return RolloutSample(dict(zip(COLUMNS, values, strict=True)), version=min(versions))
