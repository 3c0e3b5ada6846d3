"""All checks that need a GPU, in one go: `python benchmarks/gpu_checks.py [--output FOLDER] [--list]`.

What measures runs alone, and the rest before it, some at once.
For a machine with devices that may have no package index: it runs in the Python that starts it, where the
packages, pytest and torch are installed. Each check has a log; `checks.json` says what ran, how it ended, on
which machine and with which versions, and what did not run for want of what.
"""

import argparse
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from harness import RESULTS, machine, versions

ROOT = Path(__file__).parent.parent
PACKAGES = ("cluster-core", "worker-groups", "tensor-transport", "venv-manager")
NOTHING_TO_RUN = 5
LIMIT_S = 1800.0
Outcome = Literal["passed", "failed", "late", "not run"]


@dataclass(frozen=True)
class Check:
    """A command, and what it needs.

    Attributes:
        name: What it is called, as its log.
        command: Words after the interpreter's.
        devices: How many GPUs.
        needs: Modules that have to be installed, or programs that have to be found.
        path: Folders for `PYTHONPATH`.
        ends: Exit statuses of a success.
        alone: Whether nothing else may run meanwhile.
    """

    name: str
    command: Sequence[str]
    devices: int = 1
    needs: Sequence[str] = ()
    path: Sequence[Path] = ()
    ends: Collection[int] = (0,)
    alone: bool = False


@dataclass(frozen=True)
class Ended:
    """What became of a check: how it ended, or what was missing."""

    name: str
    outcome: Outcome
    seconds: float = 0.0
    last: str = ""


def checks(output: Path) -> list[Check]:
    """All of them; what is measured goes to a folder."""
    tests = [_tests(f"tests-{package}", ROOT / "packages" / package / "tests") for package in PACKAGES]
    together = ROOT / "integration-tests"
    program = [str(ROOT / "examples/grpo/run.py"), "--quick", "--output"]
    plain = ("--generator", "transformers", "--no-environments")
    return [
        *tests,
        _tests("tests-together", together, "--ignore", str(together / "on_vllm")),
        _tests("tests-vllm", together / "on_vllm", needs=["vllm"]),
        Check("bench", [str(ROOT / "benchmarks/harness.py"), "gpu", "--output", str(output)], alone=True),
        Check(
            "grpo-plain",
            [*program, str(output / "grpo-plain"), "--gpus", "1", *plain],
            needs=["transformers", "matplotlib"],
        ),
        Check("grpo-one-gpu", [*program, str(output / "grpo-1"), "--gpus", "1"], needs=["uv"]),
        Check("grpo-two-gpus", [*program, str(output / "grpo-2"), "--gpus", "2"], 2, needs=["uv"]),
    ]


def _tests(name: str, folder: Path, *more: str, needs: Sequence[str] = ()) -> Check:
    words = ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-rs", str(folder), *more)
    inner = [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]
    return Check(name, words, needs=("pytest", *needs), path=inner, ends=(0, NOTHING_TO_RUN))


def missing(check: Check, devices: int) -> str:
    """What a check lacks here; empty if nothing."""
    if devices < check.devices:
        return f"needs {check.devices} GPU(s), and {devices} are here"
    lacking = [need for need in check.needs if not importlib.util.find_spec(need) and not shutil.which(need)]
    return f"needs {', '.join(lacking)}" if lacking else ""


def run(check: Check, folder: Path, limit_s: float = LIMIT_S) -> Ended:
    """Run a check to its end, or to its limit; its log is in the folder."""
    log, start = folder / f"{check.name}.log", time.monotonic()
    with log.open("wb") as told:
        process = subprocess.Popen(
            [sys.executable, *check.command],
            stdout=told,
            stderr=subprocess.STDOUT,
            env=_environment(check),
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
    lines = log.read_text(errors="replace").strip().splitlines()
    outcome: Outcome = "late" if status is None else "passed" if status in check.ends else "failed"
    return Ended(check.name, outcome, time.monotonic() - start, lines[-1] if lines else "")


def _environment(check: Check) -> Mapping[str, str]:
    path = os.pathsep.join([*map(str, check.path), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "PYTHONPATH": path.rstrip(os.pathsep),
        "REQUIRE_GPU": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }


def device_names() -> list[str]:
    """The GPUs that torch sees."""
    import torch

    return [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]


def run_all(chosen: Sequence[Check], devices: Sequence[str], folder: Path, at_once: int = 1) -> list[Ended]:
    """What became of each check, which is written down after each of them."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"machine": machine(), "devices": list(devices), "versions": versions()}
    ended: list[Ended] = []

    def end(check: Check) -> Ended:
        lack = missing(check, len(devices))
        return Ended(check.name, "not run", last=lack) if lack else run(check, folder)

    with ThreadPoolExecutor(at_once) as pool:
        for alone in (False, True):
            for one in pool.map(end, [check for check in chosen if check.alone == alone]):
                ended.append(one)
                content = {**about, "checks": [asdict(each) for each in ended]}
                (folder / "checks.json").write_text(json.dumps(content, indent=2) + "\n")
    return ended


def show(ended: Sequence[Ended], console: Console) -> None:
    """A table of what became of them."""
    table = Table("check", "outcome", "s", "last line")
    for one in ended:
        table.add_row(one.name, one.outcome, f"{one.seconds:.0f}", one.last)
    console.print(table)


def main() -> int:
    """Run what this machine can; 1 if anything failed, or nothing could be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu", help="folder of logs and figures")
    parser.add_argument("--at-once", type=int, default=1, help="how many checks run at the same time")
    parser.add_argument("--list", action="store_true", help="say what would run, and what it lacks here")
    options, console = parser.parse_args(), Console()
    chosen, devices = checks(options.output), device_names()
    if options.list:
        for check in chosen:
            console.print(f"{check.name}: {missing(check, len(devices)) or 'would run'}", soft_wrap=True)
        return 0
    ended = run_all(chosen, devices, options.output, options.at_once)
    show(ended, console)
    outcomes = {one.outcome for one in ended}
    return int(bool(outcomes & {"failed", "late"}) or outcomes == {"not run"})


if __name__ == "__main__":
    sys.exit(main())
