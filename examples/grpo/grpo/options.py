"""The command line."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo.config import RunConfig
from grpo.layout import Layout

VICTIMS = {"generator": "generator", "trainer": "policy"}
"""Which group `--kill-…-at` means."""
IN_TURNS = {
    "no_sync": "no-sync",
    "resume": "resume",
    "checkpoint_every": "checkpoint-every",
    **{f"kill_{group}": f"kill-{name}-at" for name, group in VICTIMS.items()},
}
"""Options of a run in turns alone."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for.

    Attributes:
        config: What the run does.
        generator: "vllm" or "transformers".
        gpus: How many GPUs to use; 0 for CPUs.
        environments: Whether workers have environments of their own, or this program's.
        output: Folder of the files that the run leaves.
        checkpoint_every: Rounds between two checkpoints.
        resume: Whether to go on from the checkpoint in `output`.
        timeline: Whether to record what each worker does when.
        kill: In which round a worker of a group is killed, by the group's name.
        max_staleness: How many versions old a sample may be; None for rounds in turns alone.
    """

    config: RunConfig
    generator: str
    gpus: int
    environments: bool
    output: Path
    checkpoint_every: int
    resume: bool
    timeline: bool
    kill: Mapping[str, int]
    max_staleness: int | None = None


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; a bad one ends the process with a usage message and exit code 2."""
    parser = argparse.ArgumentParser(
        description="Learn to sort digits by GRPO, on a Ray cluster run by raycrew."
    )
    parser.add_argument(
        "--generator", choices=("vllm", "transformers"), default="vllm", help="what samples completions"
    )
    parser.add_argument(
        "--steps", type=_positive, metavar="N", help="GRPO steps (default: 60, 10 with --quick)"
    )
    parser.add_argument(
        "--gpus",
        type=_natural,
        default=0,
        metavar="N",
        help="GPUs: one for both groups in turns, of several half for each (default: 0, CPUs only)",
    )
    parser.add_argument(
        "--no-environments",
        action="store_true",
        help="build none: workers run in this program's own, which has to have what they need",
    )
    parser.add_argument(
        "--no-sync", action="store_true", help="never update the generator: it must not learn"
    )
    parser.add_argument(
        "--seed", type=_natural, default=0, metavar="N", help="decides data, weights and samples"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("grpo-output"), metavar="DIR", help="where files go"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few steps, enough to see that everything works"
    )
    parser.add_argument(
        "--checkpoint-every",
        type=_positive,
        metavar="N",
        help="rounds between checkpoints (default: each measurement)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in the output folder"
    )
    parser.add_argument(
        "--timeline", action="store_true", help="record what each worker does when, as a page"
    )
    for name, group in VICTIMS.items():
        parser.add_argument(
            f"--kill-{name}-at",
            type=_positive,
            metavar="N",
            dest=f"kill_{group}",
            help=f"kill a {name} in round N",
        )
    parser.add_argument(
        "--async",
        type=_natural,
        metavar="K",
        dest="max_staleness",
        help="a second time, with generation going on during training; samples are at most K versions old",
    )
    given = parser.parse_args(arguments)
    if given.max_staleness is not None and (others := [name for name in IN_TURNS if getattr(given, name)]):
        parser.error(f"--async does not go with --{IN_TURNS[others[0]]}")
    if given.max_staleness is not None and Layout.of(given.gpus).takes_turns:
        parser.error("--async needs devices for both groups at once: --gpus 2, say")
    config = RunConfig(seed=given.seed, synchronise=not given.no_sync)
    if given.quick:
        config = config.quick()
    if given.steps is not None:
        config = replace(config, grpo=replace(config.grpo, steps=given.steps))
    kill = {group: at for group in VICTIMS.values() if (at := getattr(given, f"kill_{group}")) is not None}
    for name, group in VICTIMS.items():
        if kill.get(group, 0) > config.grpo.steps:
            parser.error(f"--kill-{name}-at {kill[group]} is beyond the last of {config.grpo.steps} rounds")
    return Options(
        config,
        generator=given.generator,
        gpus=given.gpus,
        environments=not given.no_environments,
        output=given.output,
        checkpoint_every=given.checkpoint_every or config.grpo.evaluate_every,
        resume=given.resume,
        timeline=given.timeline,
        kill=kill,
        max_staleness=given.max_staleness,
    )


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value
