"""Rollouts of the tests, by import path; what they do is said by their prompts."""

import asyncio
import os
import pathlib
import time

from raycrew.worker_groups import current_worker
from raycrew.worker_groups.rollouts import RolloutSample, current_rollout


class Tools:
    """A worker's state: counts what was done with it."""

    def __init__(self) -> None:
        self.used = 0


async def obey(tools: Tools, prompt: dict) -> tuple:
    """Do what the prompt says, and tell who did."""
    tools.used += 1
    which = current_rollout()
    if which.attempt < prompt.get("times", 99):
        await misbehave(prompt)
    await asyncio.sleep(prompt.get("sleep", 0.0))
    return current_worker().rank, os.getpid(), which.attempt, tools.used


async def misbehave(prompt: dict) -> None:
    """In the way that the prompt says."""
    match prompt.get("how"):
        case "raise":
            raise ValueError("as it was told")
        case "late":
            await asyncio.sleep(3600)
        case "ignore":
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    continue
        case "block":
            time.sleep(3600)
        case "die":
            os._exit(9)


async def sample(prompt: int) -> RolloutSample:
    """Leaves a note of its process, and gives a sample."""
    if folder := os.environ.get("PIDS_IN"):
        pathlib.Path(folder, str(os.getpid())).touch()
    await asyncio.sleep(0.02)
    which = current_rollout()
    return RolloutSample({"tokens": [prompt, which.sample]}, version=prompt % 3)
