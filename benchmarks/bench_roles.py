"""Roles and engines against bare Ray actors that do the same, in the same run."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from harness import Figure, figure, ratio, seconds
from raycrew.worker_groups.scheduling import Job, RayScheduler, SchedulingSpec

SPEC = SchedulingSpec(cpu=1, port_count=0)
ENGINE = "bench_roles.Engine"
KINDS = {"nap": "which waits", "spin": "which runs Python"}


class Engine:
    """Does next to nothing, or nothing for some time."""

    def step(self, a: int, *, b: str = "", c: float = 0.0) -> int:  # noqa: ARG002
        return a

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    def spin(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass


def free() -> None:
    """Wait until all CPUs are."""
    while ray.available_resources().get("CPU", 0) < ray.cluster_resources()["CPU"]:
        time.sleep(0.02)


def creation(n: int, quick: bool) -> Figure:
    def ours() -> float:
        with RayScheduler() as scheduler:
            spent = seconds(lambda: scheduler.create_workers(Job("bench", n, [SPEC])))
            scheduler.delete_workers(timeout=0.0)
        free()
        return spent

    def theirs() -> float:
        made: list[Any] = []

        def create() -> None:
            made.extend(ray.remote(Engine).options(num_cpus=1).remote() for _ in range(n))
            ray.get([actor.step.remote(0) for actor in made])

        spent = seconds(create)
        for actor in made:
            ray.kill(actor)
        free()
        return spent

    return ratio(
        f"create_workers of {n}",
        ours,
        theirs,
        baseline="bare actors, created at once and called",
        goal=1.3,
        repeat=2 if quick else 5,
    )


def calls(scheduler: RayScheduler, worker_id: str, quick: bool) -> Figure:
    count, actor = 50 if quick else 200, ray.remote(Engine).options(num_cpus=0).remote()

    def ours() -> float:
        return seconds(
            lambda: [scheduler.call_engine(worker_id, "step", None, i, b="b", c=0.5) for i in range(count)]
        )

    def theirs() -> float:
        return seconds(lambda: [ray.get(actor.step.remote(i, b="b", c=0.5)) for i in range(count)])

    measured = ratio(
        "call_engine",
        ours,
        theirs,
        baseline="one .remote and one ray.get on a bare actor",
        goal=1.3,
        repeat=7 if quick else 25,
        warmup=3,
    )
    ray.kill(actor)
    return measured


def pings(scheduler: RayScheduler, worker_id: str, method: str, quick: bool) -> Figure:
    nap_s = 3.0 if quick else 30.0
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(scheduler.call_engine, worker_id, method, None, nap_s)
        while scheduler.ping(worker_id) != "busy":
            time.sleep(0.01)
        samples = []
        while not call.done():
            samples.append(1000 * seconds(lambda: scheduler.ping(worker_id)))
            time.sleep(0.05)
        call.result()
    return figure(
        f"ping during an engine call of {nap_s:g} s, {KINDS[method]}",
        samples[:-1],
        unit="ms",
        baseline="nothing: the median time of one",
        goal=5.0,
    )


def run(quick: bool = False) -> list[Figure]:
    """All figures of the suite."""
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
    try:
        figures = [creation(16, quick)]
        with RayScheduler() as scheduler:
            (one,) = scheduler.create_workers(Job("bench", 1, [SPEC]))
            scheduler.create_engine(one, ENGINE)
            figures += [
                calls(scheduler, one, quick),
                *(pings(scheduler, one, method, quick) for method in KINDS),
            ]
    finally:
        ray.shutdown()
    return figures
