"""An agent that learns to use a tool: `python examples/agent/run.py [--quick]`.

A puzzle is a program, `f`, and a limit: which is the last of the places 0 to 7 at which f is not above it?
The agent can't read programs. For three turns it asks a tool whether f fits at a place of its choice; then it
answers. The tool is a service, which runs programs in interpreters with limits, one for each episode.
"""

import argparse
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from episodes import COLUMNS, Agent, Puzzle, play
from policy import Generator, Trainer
from rich.console import Console

from raycrew.cluster_core import RayVirtualCluster, init_ray
from raycrew.tensor_transport import sync_weights
from raycrew.worker_groups import RayWorkerGroup
from raycrew.worker_groups.rollouts import RolloutPool, RolloutStats, SampleQueue, SampleStats
from raycrew.worker_groups.services import Proxy, Service

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Run:
    """What has become of a run.

    Attributes:
        solved: Shares of the held-out puzzles that were solved before and after.
        curve: Of the puzzles of each step.
        oldest: Most versions that a sample was behind that was learnt from.
        rollouts: What the pool has counted.
        samples: What the queue has counted.
    """

    solved: tuple[float, float]
    curve: list[float]
    oldest: int
    rollouts: RolloutStats
    samples: SampleStats


def learn(cluster: RayVirtualCluster, steps: int, batch: int, held_out: int, bound: int) -> Run:
    """Train for some steps, with episodes that are at most `bound` versions old."""
    chance, curve, ages, enough = random.Random(0), list[float](), [0], threading.Event()
    puzzles = iter(lambda: None if enough.is_set() else Puzzle.made(chance), None)
    tests = [Puzzle.made(random.Random(i), is_held_out=True) for i in range(held_out)]
    with (
        Service(cluster, "tool:create", replicas=2, cwd=Path(__file__).parent, name="tool") as service,
        Proxy(service, strategy="consistent_hash", key="header:x-session") as tool,
        RayWorkerGroup(cluster, Trainer, bundle_indices_list=[[0]]) as trainer,
        RayWorkerGroup(cluster, Generator, bundle_indices_list=[[1]], enable_load_balancing=True) as policies,
        # Twice: a session may go with its server, and the next one as that comes back to its share of them.
        RolloutPool(
            cluster,
            play,
            partial(Agent, policies.handle(), tool.endpoint),
            deadline_s=60,
            retries=2,
            retry_errors=True,
        ) as pool,
        SampleQueue(COLUMNS, stale="drop") as queue,
        ThreadPoolExecutor(1) as threads,
    ):
        sync_weights(trainer, policies)
        before = solved(pool, tests)
        collecting = threads.submit(pool.collect(puzzles, queue=queue).run)
        collecting.add_done_callback(lambda _: queue.end())  # where it fails, nobody waits for its samples
        try:
            for _ in range(steps):
                with queue.get(batch, max_staleness=bound, timeout_s=TIMEOUT_S) as samples:
                    columns = {name: samples[name] for name in COLUMNS}
                    trainer.call(Trainer.train, columns).get_results(timeout=TIMEOUT_S)
                queue.advance(sync_weights(trainer, policies).version)
                curve.append(fmean(columns["solved"]))
                ages += samples.versions_behind
        finally:
            enough.set()
            rollouts = collecting.result()
        return Run((before, solved(pool, tests)), curve, max(ages), rollouts, queue.stats())


def solved(pool: RolloutPool, puzzles: list[Puzzle]) -> float:
    """The share of puzzles that are solved."""
    return fmean(group.samples[0].columns["solved"] for group in pool.collect(puzzles))


def main() -> int:
    """Read the options, learn, and show the curve; 1 if nothing was learnt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bound", type=int, default=2, help="how old an episode may be, in versions")
    parser.add_argument("--quick", action="store_true", help="a dozen small steps, to see that all works")
    options = parser.parse_args()
    sizes = (12, 8, 16) if options.quick else (40, 64, 128)
    with (
        init_ray(num_cpus=8),
        RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=4) as cluster,
    ):
        run = learn(cluster, *sizes, bound=options.bound)
    console, n = Console(), run.samples
    for step in range(0, len(run.curve), max(1, len(run.curve) // 12)):
        console.print(f"step {step:3}  {run.curve[step]:.2f}  " + "█" * round(40 * run.curve[step]))
    console.print(
        f"{run.rollouts.produced} episodes: {n.consumed} learnt from, at most {run.oldest} versions old, "
        f"{n.dropped} too old, {n.held} left over"
    )
    console.print(f"held-out puzzles solved: {run.solved[0]:.2f} before, {run.solved[1]:.2f} after")
    return 0 if options.quick or run.solved[1] > max(0.5, 2 * run.solved[0]) else 1


if __name__ == "__main__":
    sys.exit(main())
