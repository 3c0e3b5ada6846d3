"""Rewards: each completion is verified by a task of its own kind, spread over the cluster."""

from collections.abc import Sequence

from grpo.task import verify
from raycrew.worker_groups import fan_out


def verify_pair(pair: tuple[str, str]) -> float:
    """The reward of one (prompt, completion)."""
    return verify(*pair)


def rewards(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """The reward of every completion, verified in parallel, in order."""
    return list(fan_out(verify_pair, list(zip(prompts, completions, strict=True)), progress=False))
