"""How soon a dead or a stuck worker is noticed and a group whole again, and what it costs to look."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import starmap
from pathlib import Path
from typing import Any

import psutil
import ray

from harness import Figure, figure, ratio, seconds
from own_ray import own_ray
from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import WeightDirectory, sync_weights
from raycrew.tensor_transport.testing import LocalPeers
from raycrew.worker_groups import RayWorkerGroup, WorkerFailureError
from recovery_workers import Generator, Idle, Trainer

HEARTBEAT_S = 1.0
GENERATE_S = 0.2
PARTS = ("noticed", "begun", "weights", "sample")
SAID = {
    "noticed": "until the call that waits for it has noticed",
    "begun": "from then until the new one is in its __init__: process and imports",
    "weights": "from then until it has the weights",
    "sample": "from then until all have sampled again",
}


@contextlib.contextmanager
def group_of(n: int, worker: type = Idle, **options: Any) -> Iterator[RayWorkerGroup]:
    with (
        RayVirtualCluster([n + options.get("standby", 0)], use_gpus=False, cpus_per_bundle=1 / 32) as cluster,
        RayWorkerGroup(cluster, worker, **options) as group,
    ):
        yield group


def await_true(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    due = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= due:
            raise TimeoutError("what is measured did not happen")
        time.sleep(0.01)


def restart(quick: bool) -> Figure:
    """One of eight, from when it is known to be dead."""
    with group_of(8) as group:

        def ours() -> float:
            os.kill(group.call("pid").get_results()[3], signal.SIGKILL)
            await_true(lambda: group.get_worker_status()[3] == "dead")
            return seconds(group.restart_failed_workers)

        return ratio(
            "restart of one worker of 8",
            ours,
            _start_of_one,
            baseline="the start of a group of one worker",
            goal=1.3,
            repeat=3 if quick else 9,
        )


def take_over(quick: bool) -> Figure:
    """The same where somebody stands by who has imported what the class needs."""
    with group_of(8, standby=1, preload=("torch", "raycrew.tensor_transport")) as group:

        def await_standby() -> None:
            await_true(lambda: all(spare.pid is not None for spare in group.spares))

        def ours() -> float:
            await_standby()
            os.kill(group.call("pid").get_results()[3], signal.SIGKILL)
            await_true(lambda: group.get_worker_status()[3] == "dead")
            return seconds(group.restart_failed_workers)

        def theirs() -> float:
            await_standby()  # nothing else is started meanwhile
            return _start_of_one()

        return ratio(
            "one worker of 8 taken over by a standby",
            ours,
            theirs,
            baseline="the start of a group of one worker",
            goal=0.25,
            repeat=3 if quick else 9,
        )


def _start_of_one() -> float:
    with RayVirtualCluster([1], use_gpus=False, cpus_per_bundle=1 / 32) as cluster:
        begin = time.perf_counter()
        started = RayWorkerGroup(cluster, Idle)
        spent = time.perf_counter() - begin
        started.shutdown(force=True)
    return spent


def noticed(quick: bool) -> list[Figure]:
    repeat, dead, stopped = 2 if quick else 7, [], []
    for number in range(repeat):
        with group_of(2) as group:
            pids = group.call("pid").get_results()
            napping = group.on(ranks=[0]).call("nap", 600)
            time.sleep(1.0 + number / repeat)  # at any time between two beats
            os.kill(pids[1], signal.SIGSTOP)
            begin = time.perf_counter()
            await_true(lambda: 1 in group.detect_stuck_workers(600))
            stopped.append((time.perf_counter() - begin) / HEARTBEAT_S)
            os.kill(pids[0], signal.SIGKILL)
            begin = time.perf_counter()
            with contextlib.suppress(WorkerFailureError):
                napping.get_results(timeout=60)
            dead.append((time.perf_counter() - begin) / HEARTBEAT_S)
            group.shutdown(force=True)
    return [
        figure(
            "SIGSTOP until detect_stuck_workers names the worker",
            stopped,
            unit="heartbeats",
            baseline="a heartbeat: 1 s",
            goal=2.0,
        ),
        figure(
            "SIGKILL until the waiting call raises",
            dead,
            unit="heartbeats",
            baseline="a heartbeat: 1 s",
            goal=2.0,
        ),
    ]


@ray.remote(num_cpus=0)
class Plain:
    """An actor of Ray's that does nothing, awaited as the watch is."""

    async def pid(self) -> int:
        return os.getpid()


def watching(quick: bool) -> list[Figure]:
    """What the heartbeats and the watch of a node spend on idle workers, of one core.

    The watch is an actor, and Ray's own threads cost something in each: so they do in one that does nothing.
    """
    n, for_s = (8, 5.0) if quick else (64, 30.0)
    with group_of(n, init_timeout_s=600) as group:
        hearts = group.call("heart").get_results(timeout=300)
        beating = [(pid, thread) for pid, threads in hearts for thread in threads]
        watch = _watch()
        keepers = [child.pid for child in psutil.Process(watch).children(recursive=True)]
        plain: Any = Plain.remote()
        nothing = ray.get(plain.pid.remote())

        def spent_s() -> list[float]:
            of_actors = [sum(_spent_s(pid, thread) for thread in _threads(pid)) for pid in (watch, nothing)]
            of_keepers = sum(_spent_s(pid, thread) for pid in keepers for thread in _threads(pid))
            return [sum(starmap(_spent_s, beating)), *of_actors, of_keepers]

        shares = []
        for _ in range(2 if quick else 5):
            before, begin = spent_s(), time.monotonic()
            time.sleep(for_s)
            after, per_s = spent_s(), 100 / (time.monotonic() - begin)
            shares.append([(late - early) * per_s for early, late in zip(before, after, strict=True)])
        ray.kill(plain)
    of_beats, of_watch, of_nothing, of_keeper = zip(*shares, strict=True)
    own = [beats + watched - none + kept for beats, watched, none, kept in shares]
    unit, what = "% of a core", f"of {n} workers on a node"
    return [
        figure(
            f"heartbeats and watch {what}",
            own,
            unit=unit,
            baseline="an actor of Ray's that does nothing, whose time is taken off the watch's",
            goal=1.0,
        ),
        figure(
            f"… the heartbeats {what} alone",
            list(of_beats),
            unit=unit,
            baseline="none: their threads' CPU time",
        ),
        figure("… the process of the watch, whole", list(of_watch), unit=unit, baseline="none: its CPU time"),
        figure("… the process of its keeper", list(of_keeper), unit=unit, baseline="none: its CPU time"),
        figure(
            "… an actor of Ray's that does nothing",
            list(of_nothing),
            unit=unit,
            baseline="none: its CPU time",
        ),
    ]


def _watch() -> int:
    """The process of the watch."""
    (named,) = (
        one
        for one in ray.util.list_named_actors(all_namespaces=True)
        if one["name"].startswith("raycrew-watch-")
    )
    watch: Any = ray.get_actor(named["name"], named["namespace"])
    return int(ray.get(watch.__ray_call__.remote(lambda _: os.getpid())))


def _threads(pid: int) -> list[int]:
    return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]


def _spent_s(pid: int, thread: int) -> float:
    """CPU time of one thread."""
    with contextlib.suppress(FileNotFoundError):
        return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9
    return 0.0


def first_sample(quick: bool) -> list[Figure]:
    """From the death of one of two generators, in the midst of a call, to its first sample."""
    samples = [_first_sample() for _ in range(1 if quick else 5)]
    total = figure(
        "SIGKILL of a generator until its first sample with current weights",
        [sum(parts.values()) for parts in samples],
        unit="s",
        baseline=f"none; of it {GENERATE_S:g} s are the sample's own",
    )
    each = (
        figure(f"… {SAID[part]}", [parts[part] for parts in samples], unit="s", baseline="part of the above")
        for part in PARTS
    )
    return [total, *each]


def _first_sample() -> dict[str, float]:
    times: dict[str, float] = {}
    options: dict[str, Any] = {
        "restart_on_failure": True,
        "idempotent_methods": ["generate"],
        "on_worker_failure": lambda _: times.setdefault("noticed", time.time()),
    }
    with (
        WeightDirectory.start() as directory,
        group_of(2, Generator, directory=directory, **options) as generators,
    ):
        trainer = LocalPeers([Trainer(directory)])
        synced = sync_weights(trainer, generators, directory=directory, prepare="prepare_weights")
        victim = generators.call("pid").get_results()[1]
        waiting = generators.call("generate", synced.version, GENERATE_S)
        time.sleep(GENERATE_S / 2)
        os.kill(victim, signal.SIGKILL)
        begin = time.time()
        (_, (value, own)) = waiting.get_results(timeout=120)
    if value != float(synced.version):
        raise RuntimeError(f"a sample of weights {value:g}, not of {synced.version}")
    times |= own
    return {part: times[part] - (times[before] if before else begin) for before, part in _pairs(PARTS)}


def _pairs(parts: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    yield from zip(("", *parts), parts, strict=False)


def run(quick: bool) -> list[Figure]:
    with own_ray(object_store_mib=256):
        again = [restart(quick), take_over(quick)]
        return [*again, *noticed(quick), *first_sample(quick), *watching(quick)]
