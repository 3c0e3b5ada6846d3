"""Small programs verified by running them, per minute: by a plain loop, on one core, on two, on two nodes."""

import contextlib
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from harness import Figure, figure, seconds
from raycrew.cluster_core.testing import simulated_nodes
from raycrew.worker_groups import close_fan_out, fan_out

EXAMPLE = Path(__file__).parent.parent / "examples" / "verifier"
sys.path.insert(0, str(EXAMPLE))

from sandbox import Submission, verify  # noqa: E402
from submissions import MEDIAN, PROGRAMS  # noqa: E402

KINDS = ("right", "wrong for even lengths", "right", "raises", "right", "does not compile")
SETTINGS = {"1 core": [1], "2 cores": [2], "2 nodes of 1 core": [1, 1]}
BASELINE = "wall time"


def submissions(count: int) -> list[Submission]:
    """Programs as a model writes them, half of them right; none that waits for a limit of time."""
    names = [KINDS[i % len(KINDS)] for i in range(count)]
    return [Submission(name, PROGRAMS[name], MEDIAN) for name in names]


def passed(verdicts: Sequence[Any]) -> int:
    """How many were right."""
    return sum(verdict.status == "passed" for verdict in verdicts)


def per_minute(count: int, run: Any) -> float:
    """Verdicts per minute; they are those that they should be."""
    items, verdicts = submissions(count), list[Any]()
    spent = seconds(lambda: verdicts.extend(run(items)))
    if passed(verdicts) != sum(item.name == "right" for item in items):
        raise RuntimeError(f"wrong verdicts: {verdicts}")
    return 60 * count / spent


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[None]:
    """This process, and all that it starts, on so many of its cores."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def plain_loop(count: int) -> float:
    """What one writes without anything."""
    with on_cores(1):
        return per_minute(count, lambda items: [verify(item) for item in items])


def fanned_out(cpus: Sequence[int], count: int) -> float:
    """By `fan_out` on nodes of so many CPUs each, on as many cores in all."""
    with on_cores(sum(cpus)), simulated_nodes([{"num_cpus": each} for each in cpus]) as cluster:
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            fan_out(verify, submissions(4 * sum(cpus)), progress=False)
            return per_minute(sum(cpus) * count, lambda items: fan_out(verify, items, progress=False))
        finally:
            close_fan_out()
            ray.shutdown()


def run(quick: bool) -> list[Figure]:
    """All figures of the suite; the settings take turns, so that a drift of the machine hits all alike."""
    rounds, count = (1, 60) if quick else (5, 600)
    if len(os.sched_getaffinity(0)) < 2:
        return []
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(EXAMPLE), path]))
    taken: dict[str, list[float]] = {"a plain loop": [], **{name: [] for name in SETTINGS}}
    for _ in range(rounds):
        taken["a plain loop"].append(plain_loop(count))
        for name, cpus in SETTINGS.items():
            taken[name].append(fanned_out(cpus, count))
    figures = [
        figure(f"programs per minute, {name}", each, unit="1/min", baseline=BASELINE, better="higher")
        for name, each in taken.items()
    ]
    alone = statistics.median(taken["1 core"])
    for name in ("2 cores", "2 nodes of 1 core"):
        shares = [each / (2 * alone) for each in taken[name]]
        row, baseline = f"programs per minute, {name} against 1 core, per core", "fan_out on 1 core"
        figures.append(figure(row, shares, unit="x", baseline=baseline, goal=0.9, better="higher"))
    return figures
