"""`fan_out` against one process, and against one Ray task per item, in the same run."""

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import ray

from harness import Figure, figure, ratio, seconds
from raycrew.worker_groups import close_fan_out, fan_out

CORES = len(os.sched_getaffinity(0))


def work(rounds: int) -> int:
    """Arithmetic that stays on one core."""
    total = 0
    for i in range(rounds):
        total += i * i
    return total


def rounds_for(target_s: float) -> int:
    """Rounds of `work` that take about `target_s` here and now."""
    each = statistics.median(seconds(lambda: work(20_000)) for _ in range(25)) / 20_000
    return max(int(target_s / each), 1)


def fanned(items: list[int]) -> Callable[[], float]:
    return lambda: seconds(lambda: fan_out(work, items, progress=False))


def single(items: list[int], share: int) -> Callable[[], float]:
    """The time one process needs for all items, from a part of them."""

    def run() -> float:
        part = items[::share]
        return seconds(lambda: [work(item) for item in part]) * len(items) / len(part)

    return run


def efficiency(quick: bool) -> list[Figure]:
    items = [rounds_for(0.005)] * 2000
    ours, theirs = fanned(items), single(items, share=8)
    ours()
    samples: dict[str, list[float]] = {"fan_out": [], "multiprocessing": []}
    with multiprocessing.get_context("spawn").Pool(CORES) as pool:
        pool.map(work, items[: 10 * CORES])

        def plain() -> float:
            return seconds(lambda: pool.map(work, items, chunksize=50))

        for _ in range(3 if quick else 9):
            for name, spent in (("fan_out", ours), ("multiprocessing", plain)):
                before, middle, after = theirs(), spent(), theirs()
                samples[name].append((before + after) / 2 / (CORES * middle))
    row = f"2,000 items of 5 ms on {CORES} cores: share of cores x single rate"
    baseline = "one process, measured before and after"
    return [
        figure(row, samples["fan_out"], unit="x", baseline=baseline, goal=0.85, better="higher"),
        figure(f"{row}, multiprocessing.Pool", samples["multiprocessing"], unit="x", baseline=baseline),
    ]


def against_tasks(quick: bool) -> Figure:
    items = [rounds_for(0.0005)] * 2000
    task = ray.remote(work)

    def theirs() -> float:
        return seconds(lambda: ray.get([task.remote(item) for item in items]))

    return ratio(
        "2,000 items of 0.5 ms: times faster than one task per item",
        fanned(items),
        theirs,
        baseline="one Ray task per item",
        goal=2.5,
        better="higher",
        repeat=3 if quick else 9,
        invert=True,
    )


def warm_call(quick: bool) -> Figure:
    items = [1] * 256
    run = fanned(items)
    run()
    samples = []
    for _ in range(10 if quick else 50):
        time.sleep(0.05)  # as between the steps of a training loop
        samples.append(1000 * run())
    return figure("256 empty items on the warm pool", samples, unit="ms", baseline="none: a plain time")


@contextlib.contextmanager
def session() -> Iterator[None]:
    """A Ray of its own, and a driver that has just connected to it."""
    with tempfile.TemporaryDirectory(prefix="rcb", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=CORES,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            close_fan_out()
            ray.shutdown()


def asked_for_ahead(quick: bool) -> list[Figure]:
    """The first call of a session, 1 s after it began, asked for ahead or not, against its next."""
    run = fanned([rounds_for(0.005)] * 200)
    samples: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(3 if quick else 9):
        for ahead in samples:
            with session():
                if ahead:
                    fan_out(work, [], warm=True)
                time.sleep(1.0)
                first = run()
                samples[ahead].append(first / run())
    row, baseline = "the first call of a session, 200 items of 5 ms", "the second call"
    return [
        figure(f"{row}, 1 s after warm=True", samples[True], unit="x", baseline=baseline, goal=1.1),
        figure(f"{row}, not asked for ahead", samples[False], unit="x", baseline=baseline),
    ]


def run(quick: bool) -> list[Figure]:
    with session():
        figures = [*efficiency(quick), against_tasks(quick), warm_call(quick)]
    return figures + asked_for_ahead(quick)
