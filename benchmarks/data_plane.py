"""What the figures about moving data share: content, checks, and copies as a yardstick."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from harness import Figure, figure

MIB = 1 << 20


def check(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"a benchmark's result is wrong: {what}")


def content(size_bytes: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8))


def median_ms(
    name: str,
    fn: Callable[[], Any],
    *,
    repeat: int,
    goal: float | None,
    baseline: str,
    per: int = 1,
    is_right: Callable[[Any], bool] | None = None,
    cold: bool = False,
) -> Figure:
    """The time of one call, in ms (or in µs for each of `per` items); `is_right` is asked of each result.

    A check reads all of a result, and so drives the code itself out of the processor's caches. A call that is
    not timed brings it back first, unless `cold`.
    """
    fn()
    scale, unit = (1e3, "ms") if per == 1 else (1e6 / per, "µs")
    samples = []
    for _ in range(repeat):
        if not cold:
            fn()
        start = time.perf_counter()
        result = fn()
        samples.append(scale * (time.perf_counter() - start))
        check(is_right is None or is_right(result), name)
        del result
    return figure(name, samples, unit=unit, baseline=baseline, goal=goal)


def bracketed(
    name: str,
    ours: Callable[[], float],
    copy: Callable[[], float],
    *,
    goal: float,
    baseline: str,
    repeat: int,
) -> Figure:
    """How many copies fit into the time of ours, against a copy before and one after; shifting samples go."""
    samples: list[float] = []
    ours()
    copy()
    for _ in range(3 * repeat):
        before, mine, after = copy(), ours(), copy()
        if max(before, after) <= 1.5 * min(before, after):
            samples.append((before + after) / 2 / mine)
        if len(samples) == repeat:
            break
    return figure(name, samples or [0.0], unit="x", baseline=baseline, goal=goal, better="higher")
