"""A queue of samples: how many go through it, from one process to another, and what it takes of memory."""

import os
import time
from typing import Any

import numpy as np
import psutil
import ray

from harness import Figure, figure, ratio
from own_ray import own_ray
from raycrew.worker_groups import SampleQueue

COLUMNS = ("tokens", "logprobs", "reward", "advantage")
BATCH = 256


def rows(batch: int) -> dict[str, list[Any]]:
    """A batch of four columns, two of them arrays of 64 numbers."""
    tokens, logprobs = np.arange(64, dtype=np.int32), np.zeros(64, dtype=np.float32)
    return {
        "tokens": [tokens] * batch,
        "logprobs": [logprobs] * batch,
        "reward": [0.5] * batch,
        "advantage": [-0.5] * batch,
    }


class Producer:
    """Puts samples, from a process of its own."""

    def run(self, queue: SampleQueue, batches: int, batch: int) -> None:
        columns = rows(batch)
        for version in range(batches):
            queue.put(columns, version=version)


class Plain:
    """What one would write without a queue: an actor with a list of batches."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def put(self, columns: Any) -> None:
        self.batches.append(columns)

    def get(self) -> Any:
        return self.batches.pop(0) if self.batches else None


class PlainProducer:
    """Puts batches, from a process of its own."""

    def run(self, actor: Any, batches: int, batch: int) -> None:
        columns = rows(batch)
        for _ in range(batches):
            ray.get(actor.put.remote(columns))


def start(cls: type) -> Any:
    actor = ray.remote(num_cpus=0)(cls).remote()
    ray.get(actor.__ray_ready__.remote())
    return actor


def through_queue(producer: Any, queue: SampleQueue, batches: int, batch: int) -> float:
    """Seconds until the last sample was taken and done; all columns are decoded."""
    began, running = time.perf_counter(), producer.run.remote(queue, batches, batch)
    for _ in range(batches):
        with queue.get(batch) as got:
            for name in COLUMNS:
                got[name]
    took = time.perf_counter() - began
    ray.get(running)
    return took


def through_actor(producer: Any, actor: Any, batches: int, batch: int) -> float:
    """The same without leases, ages or columns."""
    began, n = time.perf_counter(), 0
    running = producer.run.remote(actor, batches, batch)
    while n < batches:
        n += ray.get(actor.get.remote()) is not None
    took = time.perf_counter() - began
    ray.get(running)
    return took


def growth(samples: int) -> float:
    """MiB that a queue of this process has grown by, after its first tenth."""
    process, columns = psutil.Process(os.getpid()), rows(BATCH)
    before = 0
    with SampleQueue(COLUMNS, stale="drop", shuffle_seed=0, max_samples=16 * BATCH) as queue:
        for version in range(samples // BATCH):
            queue.put(columns, version=version)
            if version >= 8:
                with queue.get(BATCH, max_staleness=16) as got:
                    for name in COLUMNS:
                        got[name]
            if version == samples // BATCH // 10:
                before = process.memory_info().rss
        return (process.memory_info().rss - before) / 2**20


def run(quick: bool) -> list[Figure]:
    batches, repeat = (100, 3) if quick else (300, 5)
    figures = []
    with own_ray(1000), SampleQueue.on_ray(COLUMNS, max_samples=8192) as queue:
        producer, plain_producer, plain = start(Producer), start(PlainProducer), start(Plain)
        for batch in (BATCH, 1024):
            through_queue(producer, queue, 20, batch)
            taken = [through_queue(producer, queue, batches, batch) for _ in range(repeat)]
            name, speeds = (
                f"samples through a queue, batches of {batch}",
                [batches * batch / s for s in taken],
            )
            figures.append(
                figure(name, speeds, unit="1/s", baseline="wall time", goal=20_000, better="higher")
            )
        figures.append(
            ratio(
                "samples through a queue against batches through a bare actor",
                lambda: through_queue(producer, queue, batches, BATCH),
                lambda: through_actor(plain_producer, plain, batches, BATCH),
                baseline="a bare actor with a list",
                repeat=repeat,
            )
        )
    grown = growth(100_000 if quick else 1_000_000)
    count = "100,000" if quick else "1,000,000"
    figures.append(
        figure(f"memory after {count} samples", [grown], unit="MiB", baseline="after a tenth", goal=20)
    )
    return figures
