"""A trainer and a generator on the same bundles: `python examples/generation/colocated.py [--worker vllm]`.

They are awake in turns: the trainer learns from the generator's samples and publishes its weights, gives up
its memory, and only then is the generator woken, which takes the weights before it generates. The end is a
report of all phases, with the most memory that each had.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from generation import EngineOptions, Generators, start_generators
from generation.group import ENVIRONMENTS, PROJECTS, WORKERS
from raycrew.cluster_core import Cluster, RayVirtualCluster, init_ray
from raycrew.tensor_transport import BatchedDataDict, WeightDirectory
from raycrew.venv_manager import RegistryEnvironmentProvider, register_actor_environment
from raycrew.worker_groups import PhaseManager, RankInfo, RayWorkerGroup

PATH = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}
SAMPLING = {"max_tokens": 16, "n": 4, "ignore_eos": True}


class Colocated:
    """A trainer and a generator that have the same bundles in turns.

    Attributes:
        phases: Whose turn it is: "train" or "generate".
        trainer: One `Learner`.
        generators: Replicas of a generator.
    """

    def __init__(self, phases: PhaseManager, trainer: RayWorkerGroup, generators: Generators) -> None:
        self.phases, self.trainer, self.generators = phases, trainer, generators

    def step(self, prompts: torch.Tensor, sampling: Mapping[str, Any]) -> tuple[float, set[int]]:
        """Generate, learn of it, and publish; the mean reward, and the versions that chose the tokens."""
        with self.phases.turn("generate"):
            samples = self.generators.generate(BatchedDataDict({"prompt_ids": prompts}), sampling)
        with self.phases.turn("train"):
            reward = self.trainer.call("learn_and_publish", prompts, samples).get_results()[0]
        return reward, set(samples["weight_versions"].values.tolist())


@contextmanager
def colocated(
    cluster: Cluster,
    directory: WeightDirectory,
    worker: str,
    options: EngineOptions,
    folder: str,
    learner: str = "learner.Learner",
    **group: Any,
) -> Iterator[Colocated]:
    """Start both, each in a turn of its own.

    Args:
        cluster: Bundles for two groups.
        directory: Where weights are found.
        worker: The kind of generator.
        options: Its engine, of the trainer's model.
        folder: Where the trainer's state lies while it sleeps.
        learner: The trainer's class, or one that is like it.
        **group: Options of both groups.
    """
    phases = PhaseManager("train", "generate")

    def sleeper(name: str, **init: Any) -> Any:
        """What gives a worker's arguments: one that is replaced comes up asleep unless it has its turn."""

        def init_of(_: RankInfo) -> dict[str, Any]:
            return {"directory": directory, "asleep": not phases.may_wake(name), **init}

        return init_of

    with ExitStack() as started:
        with phases.turn("train"):
            trainer = started.enter_context(
                RayWorkerGroup(
                    cluster,
                    learner,
                    workers_per_node=1,
                    init=sleeper("train", config=options.model, folder=folder),
                    env_vars={"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"},
                    restart_on_failure=True,
                    idempotent_methods=("offload", "onload"),
                    **group,
                )
            )
            phases.add("train", trainer, sleep="offload", wake="onload")
            trainer.call("publish_weights").get_results()
        with phases.turn("generate"):
            generators = started.enter_context(
                start_generators(cluster, worker, options, worker_options=sleeper("generate"), **group)
            )
            phases.add("generate", generators.group)
        yield Colocated(phases, trainer, generators)


def main() -> None:
    """Take some steps, and tell of the phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", choices=sorted(WORKERS), default="transformers")
    parser.add_argument("--steps", type=int, default=8)
    asked, console = parser.parse_args(), Console()
    for worker, kind in (
        (WORKERS[asked.worker], ENVIRONMENTS[asked.worker]),
        ("learner.Learner", "transformers"),
    ):
        register_actor_environment(worker, f"uv run --directory {PROJECTS / kind}")
    prompts = torch.arange(4) + torch.arange(8)[:, None]
    with (
        init_ray(num_cpus=4),
        WeightDirectory.start() as directory,
        RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=2) as cluster,
        tempfile.TemporaryDirectory() as folder,
        colocated(
            cluster,
            directory,
            asked.worker,
            EngineOptions(MODEL),
            folder,
            environments=RegistryEnvironmentProvider(),
        ) as both,
    ):
        console.print(both.trainer.call("explain").get_results()[0])
        console.print(both.generators.call("explain")[0])
        for number in range(asked.steps):
            reward, versions = both.step(prompts, SAMPLING)
            console.print(f"step {number}: reward {reward:.2f}, tokens of version {versions}")
        console.print(both.phases.explain(), highlight=False)


if __name__ == "__main__":
    main()
