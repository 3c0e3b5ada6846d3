"""A data-parallel step that survives the death of a rank: `python examples/data_parallel/run.py [--quick]`.

Three ranks train one model with gloo and DistributedDataParallel. In the middle one of them is killed. The
group replaces it, all ranks meet at a new address, the newcomer takes the survivors' state, and training goes
on from the step that failed. Nothing is read from a disk.
"""

import argparse
import os
import signal
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from raycrew.cluster_core import RayVirtualCluster, init_ray
from raycrew.worker_groups import (
    CurrentWorker,
    NamedSharding,
    RayWorkerGroup,
    WorkerFailureError,
    rank_zero,
    sharded,
)

RANKS, INPUTS = 3, 4


class Trainer:
    """One replica of a linear model that learns to add up its inputs."""

    def __init__(self) -> None:  # alone: other ranks may be in the middle of something
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = torch.nn.Linear(INPUTS, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.done = 0

    def on_generation(self, worker: CurrentWorker) -> None:
        """Meet the other ranks, at the start and whenever the group has a new member."""
        if dist.is_initialized():
            dist.destroy_process_group()  # a survivor's, of the generation before
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        self._take_state_of_whoever_is_furthest(worker.world_size)
        self.parallel = DistributedDataParallel(self.model)

    def _take_state_of_whoever_is_furthest(self, world_size: int) -> None:
        done: list[int] = [0] * world_size
        dist.all_gather_object(done, self.done)
        state = [(self.model.state_dict(), self.optimizer.state_dict(), self.done)]
        dist.broadcast_object_list(state, src=done.index(max(done)))
        model, optimizer, self.done = state[0]
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    @sharded("dp", collect="mean")
    def train(self, inputs: Tensor) -> float:
        """One step on this rank's rows; the loss before it."""
        loss = (self.parallel(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.done += 1
        return float(loss.detach())

    @rank_zero
    def steps_done(self) -> int:
        """How many steps the model has taken."""
        return self.done

    def pid(self) -> int:
        """This worker's process."""
        return os.getpid()

    def weights(self) -> list[float]:
        """The model's weights."""
        return [float(weight) for weight in self.model.weight.detach().flatten()]


@dataclass
class Run:
    """What became of a run: losses, deaths that the group told of, the weights of each rank at the end."""

    losses: list[float] = field(default_factory=list)
    deaths: list[WorkerFailureError] = field(default_factory=list)
    weights: list[list[float]] = field(default_factory=list)


def rows(step: int) -> Tensor:
    """What a step trains on: the same again, should it be repeated."""
    return torch.randn(8 * RANKS, INPUTS, generator=torch.Generator().manual_seed(step))


def train(cluster: RayVirtualCluster, steps: int, kill_at: int | None = None) -> Run:
    """Train for some steps, and kill rank 1 during one of them."""
    run = Run()
    with RayWorkerGroup(
        cluster,
        Trainer,
        sharding_annotations=NamedSharding(list(range(RANKS)), ["dp"]),
        restart_on_failure=True,
        max_restarts=3,
        on_worker_failure=run.deaths.append,
    ) as trainers:
        victim = trainers.call(Trainer.pid).get_results(timeout=60)[1]
        step = 0
        while step < steps:
            loss = trainers.call(Trainer.train, rows(step))
            if step == kill_at and not run.deaths:
                os.kill(victim, signal.SIGKILL)
            try:
                run.losses[step:] = [loss.get_results(timeout=120)]
                step += 1
            except WorkerFailureError:  # by now the group is whole again: ask it where it stands
                step = trainers.call(Trainer.steps_done).get_results(timeout=60)
        run.weights = trainers.call(Trainer.weights).get_results(timeout=60)
    return run


def main() -> None:
    """Read the options, train, and tell what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 steps, to see that everything works")
    options = parser.parse_args()
    steps = 10 if options.quick else 60
    with init_ray(num_cpus=4), RayVirtualCluster([RANKS], use_gpus=False) as cluster:
        run = train(cluster, steps, kill_at=steps // 2)
    console = Console()
    for death in run.deaths:
        console.print(f"died on the way: {death.message}", soft_wrap=True)
    console.print(f"{steps} steps, loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}")
    console.print(f"weights of each rank: {run.weights}")


if __name__ == "__main__":
    main()
