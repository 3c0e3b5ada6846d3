"""cluster-core: what a virtual cluster costs over bare placement groups, the planner, and the import."""

import subprocess
import sys
import time

from harness import Figure, figure, ratio, seconds
from raycrew.cluster_core import NodeState, PlacementRequest, plan_cluster

ALLOCATION_GOALS = {1: 1.5, 8: 1.35, 64: 1.25}


def run(quick: bool) -> list[Figure]:
    return [*_planner(5 if quick else 15), *_imports(3 if quick else 9), *_allocation(9 if quick else 31)]


def _planner(repeat: int) -> list[Figure]:
    samples: dict[int, list[float]] = {}
    for size in (100, 1_000, 10_000):
        amounts = {"CPU": 64.0, "GPU": 8.0}
        nodes = [NodeState(f"{i:056x}", f"10.{i >> 8}.{i & 255}.1", amounts, amounts) for i in range(size)]
        request = PlacementRequest((8,) * (size * 4096 // 10_000))
        samples[size] = [seconds(lambda n=nodes, r=request: plan_cluster(n, r)) for _ in range(repeat + 1)][
            1:
        ]
    figures = [
        figure(
            f"plan {size} nodes x 8",
            samples[size],
            unit="s",
            baseline="wall time",
            goal=1.0 if size == 10_000 else None,
        )
        for size in samples
    ]
    growth = [large / small / 10 for small, large in zip(samples[1_000], samples[10_000], strict=True)]
    return [
        *figures,
        figure("plan, time per node at 10,000", growth, unit="x", baseline="per node at 1,000", goal=1.5),
    ]


def _imports(repeat: int) -> list[Figure]:
    def python(code: str) -> float:
        return seconds(lambda: subprocess.run([sys.executable, "-c", code], check=True))

    ours = "import ray, raycrew.cluster_core as c; c.RayVirtualCluster, c.init_ray"
    pairs = []
    for i in range(repeat + 1):
        order = [ours, "import ray"] if i % 2 else ["import ray", ours]
        took = {code: python(code) for code in order}
        pairs.append(took[ours] - took["import ray"])
    plan = "import raycrew.cluster_core as c; c.plan_cluster"
    return [
        figure("import, everything", pairs[1:], unit="s", baseline="over import ray", goal=0.3),
        ratio(
            "import, planner only",
            lambda: python(plan),
            lambda: python("import ray"),
            baseline="import ray",
            repeat=repeat,
        ),
    ]


def _allocation(repeat: int) -> list[Figure]:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    from raycrew.cluster_core import RayVirtualCluster

    ray.init(
        "local", num_cpus=256, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20
    )
    try:

        def bare(count: int) -> float:
            _until_free()
            start = time.perf_counter()
            group = placement_group([{"CPU": 1}] * count, strategy="STRICT_PACK")
            ray.get(group.ready())
            took = time.perf_counter() - start
            remove_placement_group(group)
            return took

        def ours(count: int) -> float:
            _until_free()
            start = time.perf_counter()
            cluster = RayVirtualCluster([count], use_gpus=False)
            took = time.perf_counter() - start
            cluster.shutdown()
            return took

        return [
            ratio(
                f"allocate {count} bundles",
                lambda count=count: ours(count),
                lambda count=count: bare(count),
                baseline="placement_group + ready",
                goal=goal,
                repeat=repeat,
                warmup=2,
            )
            for count, goal in ALLOCATION_GOALS.items()
        ]
    finally:
        ray.shutdown()


def _until_free() -> None:
    import ray

    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU") != 256 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.05)  # The removal itself has settled too.
