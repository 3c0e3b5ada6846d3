"""Worker groups against bare Ray actors that do the same, in the same run; and `fan_out`, see there."""

import asyncio
import gc
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import ray

import bench_fan_out
from harness import Figure, figure, ratio, seconds
from raycrew.cluster_core import RayVirtualCluster
from raycrew.worker_groups import NamedSharding, RayWorkerBuilder, RayWorkerGroup, sharded, timeline

MIB = 1 << 20


class Noop:
    """Does next to nothing."""

    def ping(self) -> bool:
        return True

    def step(self, a: int, *, b: str = "", c: float = 0.0) -> int:  # noqa: ARG002
        return a

    def work(self, seconds: float) -> None:
        time.sleep(seconds)

    def size(self, array: Any) -> int:
        return int(array.nbytes)

    @sharded("dp")
    def echo(self, rows: Any) -> Any:
        return rows

    def hold(self, array: Any, seconds: float) -> int:
        time.sleep(seconds)
        return int(array.nbytes)

    def tensor_pages(self, tensor: Any) -> int:
        """One number of each page, so that mapped memory is really there."""
        return int(tensor[::1024].sum())


def bare(n: int, **options: Any) -> list[Any]:
    """Actors as one writes them by hand."""
    remote = ray.remote(Noop).options(**{"num_cpus": 0, **options})
    return [remote.remote() for _ in range(n)]


def kill(actors: list[Any]) -> None:
    for actor in actors:
        ray.kill(actor)
    while ray.available_resources().get("CPU", 0) < ray.cluster_resources()["CPU"]:
        time.sleep(0.02)


def start(n: int, quick: bool) -> Figure:
    runtime_env = {"env_vars": {"RAYCREW_BENCH": "1"}}

    def ours() -> float:
        with RayVirtualCluster([n], use_gpus=False) as cluster:
            begin = time.perf_counter()
            group = RayWorkerGroup(cluster, RayWorkerBuilder(Noop).options(runtime_env=runtime_env))
            spent = time.perf_counter() - begin
            group.shutdown(force=True)
        kill([])
        return spent

    def theirs() -> float:
        begin = time.perf_counter()
        actors = bare(n, num_cpus=1, runtime_env=runtime_env)
        ray.get([actor.ping.remote() for actor in actors])
        spent = time.perf_counter() - begin
        kill(actors)
        return spent

    return ratio(
        f"start of {n} no-op workers",
        ours,
        theirs,
        baseline="bare actors, created at once and pinged",
        goal=1.3,
        repeat=2 if quick else 7,
        warmup=1,
    )


def small_calls(n: int, quick: bool) -> Figure:
    calls = 50 if quick else 100
    actors = bare(n)
    with RayVirtualCluster([n], use_gpus=False) as cluster, RayWorkerGroup(cluster, Noop) as group:

        def ours() -> float:
            def loop() -> None:
                for i in range(calls):
                    group.run_all_workers_single_data("step", i, b="b", c=0.5).get_results()

            return seconds(loop)

        def theirs() -> float:
            def loop() -> None:
                for i in range(calls):
                    ray.get([actor.step.remote(i, b="b", c=0.5) for actor in actors])

            return seconds(loop)

        measured = ratio(
            f"a call with small arguments on {n} workers",
            ours,
            theirs,
            baseline="a loop of .remote and one ray.get",
            goal=1.15,
            repeat=9 if quick else 25,
            warmup=3,
        )
    kill(actors)
    return measured


def recorded_calls(quick: bool) -> Figure:
    """Small calls while a timeline records, and while none does."""
    with RayVirtualCluster([2], use_gpus=False) as cluster, RayWorkerGroup(cluster, Noop) as group:

        def loop(calls: int = 200 if quick else 2000) -> None:  # over several looks at what workers noted
            for i in range(calls):
                group.run_all_workers_single_data("step", i, b="b", c=0.5).get_results()

        def ours() -> float:
            with timeline():
                return theirs()  # its first call has the workers begin to note theirs

        def theirs() -> float:
            loop(10)
            return seconds(loop)

        return ratio(
            "a call with small arguments on 2 workers, recorded by a timeline",
            ours,
            theirs,
            baseline="the same without a timeline",
            goal=1.02,
            repeat=9 if quick else 61,  # windows vary by a tenth: for a median that is known to a hundredth
            warmup=2,
        )


def declared_calls(quick: bool) -> Figure:
    """A method that is split and joined by itself, and the same by hand."""
    calls = 25 if quick else 50
    rows = np.arange(64.0).reshape(16, 4)
    axes: dict[str, Any] = {"in_sharded_axes": ["dp"], "replicate_on_axes": ["tp"]}
    sharding = NamedSharding([[0, 1], [2, 3]], ["dp", "tp"])
    with (
        RayVirtualCluster([4], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Noop, sharding_annotations=sharding) as group,
    ):

        def ours() -> float:
            def loop() -> None:
                for _ in range(calls):
                    group.call(Noop.echo, rows).get_results()

            return seconds(loop)

        def theirs() -> float:
            def loop() -> None:
                for _ in range(calls):
                    shards = [rows[:8], rows[8:]]
                    sent = group.run_all_workers_sharded_data(
                        "echo", shards, **axes, output_is_replicated=["tp"]
                    )
                    np.concatenate(sent.get_results())

            return seconds(loop)

        return ratio(
            "a @sharded call on 2 x 2 workers",
            ours,
            theirs,
            baseline="run_all_workers_sharded_data, split and joined by hand",
            goal=1.05,
            repeat=15 if quick else 41,
            warmup=3,
        )


def awaited_calls(n: int, quick: bool) -> list[Figure]:
    """Calls one after the other in a coroutine, and in a plain loop; and awaited as Ray itself does."""
    with RayVirtualCluster([n], use_gpus=False) as cluster, RayWorkerGroup(cluster, Noop) as group:

        def call(i: int) -> Any:
            return group.run_all_workers_single_data("step", i, b="b", c=0.5)

        def working(i: int) -> Any:  # noqa: ARG001
            return group.run_all_workers_single_data("work", 0.01)

        async def awaited(calls: int, call: Callable[[int], Any], wait: Callable[[Any], Any]) -> float:
            begin = time.perf_counter()
            for i in range(calls):
                await wait(call(i))
            return time.perf_counter() - begin

        def blocking(calls: int, call: Callable[[int], Any]) -> None:
            for i in range(calls):
                call(i).get_results()

        def against_blocking(
            what: str,
            goal: float | None,
            *,
            calls: int = 50 if quick else 100,
            call: Callable[[int], Any] = call,
            wait: Callable[[Any], Any] = lambda future: future,
        ) -> Figure:
            return ratio(
                what,
                lambda: asyncio.run(awaited(calls, call, wait)),
                lambda: seconds(lambda: blocking(calls, call)),
                baseline="the same call and get_results()",
                goal=goal,
                repeat=9 if quick else 25,
                warmup=3,
            )

        own = f"an awaited call on {n} workers"
        return [
            against_blocking(own, 1.1),
            against_blocking(f"{own}, as Ray awaits its ObjectRefs", None, wait=lambda f: asyncio.gather(*f)),
            against_blocking(f"{own} that takes them 10 ms", 1.1, calls=10 if quick else 20, call=working),
        ]


def store_mib() -> float:
    """What the object store holds, by the node's last report."""
    total = ray.cluster_resources()["object_store_memory"]
    return (total - ray.available_resources().get("object_store_memory", 0.0)) / MIB


def store_used(during: Callable[[], Any], wait_s: float) -> float:
    """The most MiB that the object store held while calls of `wait_s` seconds ran, above those before."""

    gc.collect()
    time.sleep(2.0)  # The figure comes with the next report of the node.
    before, most = store_mib(), 0.0
    refs = during()
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        most = max(most, store_mib())
        time.sleep(0.05)
    ray.get(refs)
    return most - before


def large_arguments(quick: bool) -> list[Figure]:
    shared = np.ones(64 * MIB, np.uint8)
    shards = [np.full(32 * MIB, i, np.uint8) for i in range(2)]
    sharding = NamedSharding([[0, 1, 2, 3], [4, 5, 6, 7]], ["dp", "tp"])
    repeat, hold_s = (3, 4.0) if quick else (7, 6.0)
    with (
        RayVirtualCluster([8], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Noop, sharding_annotations=sharding) as group,
    ):
        handles = group.workers
        axes: dict[str, Any] = {"in_sharded_axes": ["dp"], "replicate_on_axes": ["tp"]}

        def by_value(arrays: list[Any], method: str = "size", *args: Any) -> list[Any]:
            each = len(handles) // len(arrays)
            return [getattr(h, method).remote(arrays[i // each], *args) for i, h in enumerate(handles)]

        def one_for_all(method: str = "size", *args: Any) -> Any:
            return group.run_all_workers_single_data(method, shared, *args)

        def one_per_shard(method: str = "size", **common: Any) -> Any:
            return group.run_all_workers_sharded_data(method, shards, **axes, common_kwargs=common)

        return [
            ratio(
                "64 MiB of numpy for 8 workers: times faster",
                lambda: seconds(lambda: one_for_all().get_results()),
                lambda: seconds(lambda: ray.get(by_value([shared]))),
                baseline="the same argument by value in each call",
                goal=2.0,
                better="higher",
                invert=True,
                repeat=repeat,
            ),
            figure(
                "64 MiB of numpy for 8 workers: object store",
                [store_used(lambda: one_for_all("hold", hold_s), hold_s) / 64],
                unit="copies",
                baseline="none: copies of the argument",
                goal=1.1,
            ),
            ratio(
                "2 shards of 32 MiB x 4 replicas: times faster",
                lambda: seconds(lambda: one_per_shard().get_results()),
                lambda: seconds(lambda: ray.get(by_value(shards))),
                baseline="each shard by value in each call",
                goal=1.5,
                better="higher",
                invert=True,
                repeat=repeat,
            ),
            figure(
                "2 shards of 32 MiB x 4 replicas: object store",
                [store_used(lambda: one_per_shard("hold", seconds=hold_s), hold_s) / (8 * 32)],
                unit="of by value",
                baseline="8 shards by value",
                goal=0.275,
            ),
        ]


def torch_arguments(quick: bool) -> list[Figure]:
    import torch

    from raycrew.tensor_transport import TensorArguments

    tensor = torch.ones(64 * MIB // 4)
    with (
        RayVirtualCluster([8], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Noop, transport=TensorArguments()) as group,
    ):
        plain = bare(8)
        return [
            ratio(
                "64 MiB of torch for 8 workers, with a transport: times faster",
                lambda: seconds(lambda: group.call("tensor_pages", tensor).get_results()),
                lambda: seconds(lambda: ray.get([a.tensor_pages.remote(tensor) for a in plain])),
                baseline="the same tensor by value in each call to bare actors",
                goal=10.0,
                better="higher",
                invert=True,
                repeat=2 if quick else 5,
            )
        ]


def named_actors() -> int:
    """How many there are, but for the watches of nodes, which stay for the next group."""
    listed: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return sum(1 for actor in listed if not actor["name"].startswith("raycrew-watch-"))


def leaks(quick: bool) -> list[Figure]:
    n_calls = 1000 if quick else 10_000
    process, array = psutil.Process(), np.ones(MIB, np.uint8)

    def held() -> dict[str, float]:
        gc.collect()
        time.sleep(2.0)  # What the store holds comes with the next report of the node.
        return {
            "driver memory, MiB": process.memory_info().rss / MIB,
            "object store, MiB": store_mib(),
            "actors": named_actors(),
            "file descriptors": process.num_fds(),
            "threads": threading.active_count(),
            "Python objects": len(gc.get_objects()),
        }

    with RayVirtualCluster([2], use_gpus=False) as cluster:
        actors = named_actors()
        with RayWorkerGroup(cluster, Noop) as group:

            def call(n: int) -> None:
                for i in range(n):
                    group.run_all_workers_single_data("step", i, b="b").get_results()
                    if i % 10 == 0:
                        group.run_all_workers_single_data("size", array).get_results()

            call(500)
            before = held()
            call(n_calls)
            after = held()
        left = named_actors() - actors
    goals = dict(zip(before, (10.0, 1.0, 0.0, 2.0, 0.0, 200.0), strict=True))
    return [
        *(
            figure(
                f"{what}: growth over {n_calls:,} calls",
                [float(after[what] - before[what])],
                unit="",
                baseline="after 500 calls",
                goal=goals[what],
            )
            for what in before
        ),
        figure("actors left after the shutdown", [float(left)], unit="", baseline="before", goal=0.0),
    ]


def run(quick: bool) -> list[Figure]:
    # By value, so that workers need not have this folder on their path.
    ray.cloudpickle.register_pickle_by_value(__import__(__name__))
    with tempfile.TemporaryDirectory(prefix="rcb", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=17,
            include_dashboard=False,
            object_store_memory=1536 * MIB,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            figures = [
                *(small_calls(n, quick) for n in (2, 8, 16)),
                declared_calls(quick),
                recorded_calls(quick),
            ]
            figures += [*awaited_calls(2, quick), *awaited_calls(8, quick)]
            figures += large_arguments(quick) + torch_arguments(quick) + leaks(quick)
            figures = [start(16, quick), *figures]
        finally:
            ray.shutdown()
    return [*figures, *bench_fan_out.run(quick)]
