"""What the figures about moving data share: content, checks, and copies as a yardstick."""

from collections.abc import Callable

import numpy as np
import torch

from harness import Figure, figure, seconds

MIB = 1 << 20


def check(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"a benchmark's result is wrong: {what}")


def content(size_bytes: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8))


def milliseconds(fn: Callable[[], object]) -> float:
    return 1e3 * seconds(fn)


def median_ms(
    name: str,
    fn: Callable[[], object],
    *,
    repeat: int,
    goal: float | None,
    baseline: str,
    per: int = 1,
    is_right: Callable[[], bool] = lambda: True,
) -> Figure:
    """The time of one call, in ms (or in µs for each of `per` items); `is_right` is asked after each."""
    fn()
    scale, unit = (1.0, "ms") if per == 1 else (1e3 / per, "µs")
    samples = []
    for _ in range(repeat):
        samples.append(scale * milliseconds(fn))
        check(is_right(), name)
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
