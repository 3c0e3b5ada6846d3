"""Two generators that are updated while they generate: `python examples/generation/run.py [--worker vllm]`.

The model has random weights, made on the spot. A trainer in this process publishes other ones in the middle
of a call: the samples go on under them, and tell of each token which weights chose it.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from generation import EngineOptions, Generators, start_generators
from generation.group import ENVIRONMENTS, PROJECTS, WORKERS
from raycrew.cluster_core import RayVirtualCluster, init_ray
from raycrew.tensor_transport import BatchedDataDict, RouteStore, WeightDirectory, WeightRoute, sync_weights
from raycrew.venv_manager import RegistryEnvironmentProvider, register_actor_environment
from raycrew.worker_groups import RayWorkerGroup

HERE = Path(__file__).parent
MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "eos_token_id": 1,
}
TIMEOUT_S = 120.0


def use_environment(worker: str, kind: str) -> None:
    """Have workers of a class run in the environment of a project file, which is built if need be."""
    register_actor_environment(worker, f"uv run --directory {PROJECTS / kind}")


def update_meanwhile(
    generators: Generators, trainer: RayWorkerGroup, **how: Any
) -> tuple[BatchedDataDict, int]:
    """Samples during which the weights were replaced, as `how` says, and the version that came."""
    prompts = BatchedDataDict({"prompt_ids": [[number, number + 1] for number in range(2, 34)]})
    long = {"max_tokens": 512, "ignore_eos": True, "seed": 0}
    on_its_way = [
        generators.group.balancer.call("generate", half, long, timeout=TIMEOUT_S) for half in prompts.shard(2)
    ]
    while not all(found.tokens > 32 for found in generators.metrics()):
        time.sleep(0.01)
    version = sync_weights(trainer, generators.group, prepare="prepare_weights", **how).version
    parts = [future.get_results()[0] for future in on_its_way]
    return BatchedDataDict.from_batches(parts), version


def main() -> None:
    """Start both groups, and tell what came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", choices=sorted(WORKERS), default="transformers")
    options, console = parser.parse_args(), Console()
    use_environment(WORKERS[options.worker], ENVIRONMENTS[options.worker])
    use_environment("trainer.RandomTrainer", "transformers")
    provider = RegistryEnvironmentProvider()
    with (
        init_ray(num_cpus=4),
        WeightDirectory.start() as directory,
        WeightRoute() as route,
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayVirtualCluster([1], use_gpus=False) as one,
        RayWorkerGroup(
            one,
            "trainer.RandomTrainer",
            environments=provider,
            env_vars={"PYTHONPATH": str(HERE)},
            config=MODEL,
            directory=directory,
        ) as trainer,
        start_generators(
            cluster,
            options.worker,
            EngineOptions(MODEL),
            environments=provider,
            worker_options={"directory": directory, "store": RouteStore},
        ) as generators,
    ):
        console.print(f"replica 0 is {generators.call('explain')[0]}")
        how = {"directory": directory, "route": route, "timeout_s": TIMEOUT_S}
        sync_weights(trainer, generators.group, **how)
        console.print(route.explain(), highlight=False)
        samples, version = update_meanwhile(generators, trainer, **how)
        versions = samples["weight_versions"].values
        console.print(f"{len(versions)} tokens in {samples.size} samples while version {version} came:")
        for found in versions.unique().tolist():
            console.print(f"  version {found} chose {int((versions == found).sum())} of them")
        for rank, found in enumerate(generators.metrics()):
            console.print(
                f"replica {rank}: {found.tokens_per_s:.0f} tokens/s, version {found.weight_version}"
            )


if __name__ == "__main__":
    main()
