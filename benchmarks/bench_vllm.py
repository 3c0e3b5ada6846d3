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
    model, repeat = SMALL if quick else MODEL, 2 if quick else 7
    with own_ray(256 if quick else 1024), both(model) as stage:
        with both(model, packs_ahead=False) as loading:
            transfers, beside = _Transfers(loading, repeat), _Transfers(stage, repeat)
            figures = [*transfers.figures(), *beside.beside_packing(), *pauses(stage, loading, repeat)]
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
def both(model: dict[str, Any], *, packs_ahead: bool = True) -> Iterator[Stage]:
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
            EngineOptions(model, packs_ahead=packs_ahead),
            env_vars=variables,
            worker_options={"directory": directory},
            **how,
        ) as generators,
    ):
        stage = Stage(trainer, generators, directory)
        for _ in range(4):  # Until all memory is there that an update takes.
            stage.sync()
        yield stage


class _Transfers:
    """What it takes to have all of a version at hand in an engine's process."""

    def __init__(self, stage: Stage, repeat: int) -> None:
        self.stage, self.trainer, self.repeat = stage, stage.trainer, repeat

    def figures(self) -> list[Figure]:
        """Beside copies and files, of an engine that loads afterwards."""
        found = [self._over_copies("transfer", False, 2.0), self._over_copies("transfer", True, 3.0)]
        found += [self._over_tensors(checksums) for checksums in (False, True)]
        samples = [1e3 * self._taken() for _ in range(self.repeat)]
        name = f"transfer of {megabytes(self.stage):.0f} MB, with checksums"
        found.append(figure(name, samples, unit="ms", baseline="-"))
        beside = ("read", "saved, and read into memory")
        found.append(over_files("transfer", self.stage, self._taken, *beside, self.repeat))
        return found

    def beside_packing(self) -> list[Figure]:
        """Beside copies, of an engine that packs meanwhile what it has."""
        return [self._over_copies("transfer beside packing", checksums) for checksums in (False, True)]

    def _over_copies(self, what: str, checksums: bool, goal: float | None = None) -> Figure:
        return self._over(f"{what}, {_with(checksums)}", checksums, "copy", "a copy of the bytes", goal=goal)

    def _over_tensors(self, checksums: bool) -> Figure:
        """The C library writes one large copy past the cache, as it does not the tensors of a model."""
        name = f"transfer over its tensors, {_with(checksums)}"
        return self._over(name, checksums, "copy_tensors", "its tensors copied one by one")

    def _over(self, name: str, checksums: bool, method: str, baseline: str, **how: Any) -> Figure:
        self.trainer.call("use_checksums", checksums).get_results()
        return ratio(
            name, self._taken, lambda: self._copy(method), baseline=baseline, repeat=self.repeat, **how
        )

    def _copy(self, method: str) -> float:
        return statistics.median(self.trainer.call(method).get_results()[0] for _ in range(3))

    def _taken(self) -> float:
        """Seconds until the last bytes that the trainer has are at hand in the engine's process."""
        return max(span.end_s for span in self.stage.sync().spans if span.phase == "wire")


def _with(checksums: bool) -> str:
    return f"{'with' if checksums else 'no'} checksums"


def megabytes(stage: Stage) -> float:
    """Of the weights."""
    return float(stage.trainer.call("size_bytes").get_results()[0]) / 1e6


def pauses(stage: Stage, loading: Stage, repeat: int) -> list[Figure]:
    """How long an update keeps an engine from generating; whole updates beside saving and loading."""
    taken: dict[str, list[float]] = {"packed ahead": [], "loaded within it": []}

    def pause(of: Stage, how: str) -> float:
        taken[how].append(of.sync().pause_s)
        return taken[how][-1]

    times = ratio(
        "pause: loaded within it over packed ahead",
        lambda: pause(loading, "loaded within it"),
        lambda: pause(stage, "packed ahead"),
        baseline="only exchanged with what was packed between steps of the engine",
        goal=5.0,
        better="higher",
        repeat=repeat,
    )
    found = [times]
    for how, samples in taken.items():
        milliseconds = [1e3 * sample for sample in samples[1:]]
        name = f"pause of {megabytes(stage):.0f} MB, {how}"
        found.append(figure(name, milliseconds, unit="ms", baseline="-"))
    beside = ("reload", "saved, and loaded by vLLM's reload_weights")
    found.append(over_files("transfer and pause", stage, lambda: seconds(stage.sync), *beside, repeat))
    return found


def over_files(
    what: str, stage: Stage, ours: Callable[[], float], method: str, baseline: str, repeat: int
) -> Figure:
    """How many times as fast as a checkpoint that the trainer saves, and a method of the generator loads."""
    with tempfile.TemporaryDirectory() as folder:

        def save_and_load() -> None:
            stage.trainer.call("save", folder).get_results()
            stage.generators.call(method, folder)

        return ratio(
            f"{what}: speed over safetensors",
            ours,
            lambda: seconds(save_and_load),
            baseline=baseline,
            goal=3.0,
            better="higher",
            invert=True,
            repeat=repeat,
        )


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
