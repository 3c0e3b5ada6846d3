"""Packing 100,000 sequences into bins of 4,096 tokens: time and efficiency against a plain first-fit."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from harness import Figure, figure, seconds
from raycrew.tensor_transport import balance, pack

CAPACITY = 4096
RANKS = 64
ALGORITHMS = (
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "best_fit_decreasing",
    "first_fit",
    "concatenative",
)


def lengths_of(count: int, seed: int) -> list[int]:
    """Log-normal lengths of median 512 and sigma 1, cut off at one bin."""
    drawn = np.random.default_rng(seed).lognormal(np.log(512), 1, count)
    return np.clip(drawn.astype(int), 1, CAPACITY).tolist()


def plain_first_fit_decreasing(lengths: list[int]) -> int:
    """The usual code: every sequence looks at every bin from the first one on; the number of bins."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        for b, left in enumerate(room):
            if left >= length:
                room[b] = left - length
                break
        else:
            room.append(CAPACITY - length)
    return len(room)


def run(quick: bool) -> list[Figure]:
    """Each repetition draws its own lengths; the plain code and ours see the same ones."""
    repeat, plain_count = (3, 10_000) if quick else (7, 100_000)
    found: dict[str, list[float]] = defaultdict(list)
    for seed in range(repeat):
        lengths = lengths_of(100_000, seed)
        for algorithm in ALGORITHMS:
            taken, packing = timed(
                lambda lengths, algorithm: pack(lengths, CAPACITY, algorithm), lengths, algorithm
            )
            found[f"{algorithm} s"].append(taken)
            found[f"{algorithm} efficiency"].append(packing.efficiency)
        taken, totals = timed(pack_and_deal, lengths)
        found["deal s"].append(taken)
        found["imbalance"].append(max(totals) / (sum(totals) / RANKS))
    for seed in range(repeat if quick else 1):  # the plain code takes about a minute for 100,000
        _against_plain(found, lengths_of(plain_count, seed))
    return _figures(found, plain_count)


def timed(fn: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Wall time of one call, and its result."""
    result: list[Any] = []
    return seconds(lambda: result.append(fn(*args))), result[0]


def pack_and_deal(lengths: list[int]) -> list[int]:
    """Tokens of each rank, with as many bins for every rank."""
    packing = pack(lengths, CAPACITY, bin_count_multiple=RANKS)
    return [sum(packing.loads[b] for b in bins) for bins in balance(packing.loads, RANKS)]


def _against_plain(found: dict[str, list[float]], lengths: list[int]) -> None:
    plain, bins = timed(plain_first_fit_decreasing, lengths)
    ours, packing = timed(lambda: pack(lengths, CAPACITY, "first_fit_decreasing"))
    found["speed-up"].append(plain / ours)
    found["bins"].append(len(packing.bins) / bins)


def _figures(found: dict[str, list[float]], plain_count: int) -> list[Figure]:
    figures = []
    for algorithm in ALGORITHMS:
        tight = algorithm.endswith("decreasing")
        figures += [
            figure(
                f"{algorithm}, 100,000 sequences",
                found[f"{algorithm} s"],
                unit="s",
                baseline="wall time",
                goal=1.0 if tight else None,
            ),
            figure(
                f"{algorithm}, efficiency",
                found[f"{algorithm} efficiency"],
                unit="",
                baseline="tokens / room of all bins",
                goal=0.9995 if tight else None,
                better="higher",
            ),
        ]
    plain = f"plain first-fit decreasing, {plain_count:,} sequences"
    return [
        *figures,
        figure(
            "first_fit_decreasing, speed-up",
            found["speed-up"],
            unit="x",
            baseline=plain,
            goal=10,
            better="higher",
        ),
        figure("first_fit_decreasing, bins", found["bins"], unit="x", baseline=plain, goal=1.0),
        figure(f"packed and dealt to {RANKS} ranks", found["deal s"], unit="s", baseline="wall time"),
        figure(
            f"tokens of the fullest of {RANKS} ranks",
            found["imbalance"],
            unit="x",
            baseline="mean of the ranks",
        ),
    ]
