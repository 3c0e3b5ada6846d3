"""All checks that need a GPU, in one go: `python benchmarks/gpu_checks.py [CHECK ...] [--resume [FOLDER]]`.

For a machine with devices that may have no package index, and may be there for minutes only: it runs in the
Python that starts it, where the packages, pytest and torch are installed. What does not measure runs first,
some at once; then each of the others alone. Each check and each test has a limit, all together have
`--within`, and what comes first is what fits. What became of a test is told when it ends, and all is written
as it comes: a log for each check, a line for each test (`CHECK.tests`), and `checks.json`, with the machine,
the versions, and what did not run for want of what. With `--resume` what has passed, by a folder of an
earlier run of the same tree, is not run again.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from harness import RESULTS, machine, versions

ROOT = Path(__file__).parent.parent
PACKAGES = ROOT / "packages"
TOGETHER = ROOT / "integration-tests"
TELLING = Path(__file__).parent / "telling"
sys.path.insert(0, str(TELLING))

import tests_told  # noqa: E402

NOTHING_TO_RUN = 5
LEAST_S = 15.0
"""A check that has less is not begun."""
GRACE_S = 15.0
"""So long has a check that is told to end to say what it knows, and to clear up."""
Outcome = Literal["passed", "failed", "late", "not run"]
Say = Callable[[str], object]


def silent(_: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Check:
    """A command, and what it needs.

    Attributes:
        name: What it is called, as its log.
        command: Words after the interpreter's.
        limit_s: How long it may take.
        devices: How many GPUs.
        needs: Modules that have to be installed, or programs that have to be found.
        path: Folders for `PYTHONPATH`.
        ends: Exit statuses of a success.
        alone: Whether nothing else may run meanwhile.
    """

    name: str
    command: Sequence[str]
    limit_s: float = 120.0
    devices: int = 1
    needs: Sequence[str] = ()
    path: Sequence[Path] = ()
    ends: Collection[int] = (0,)
    alone: bool = False


@dataclass(frozen=True)
class Ended:
    """What became of a check: how it ended, or what was missing; and of its tests, by name."""

    name: str
    outcome: Outcome
    seconds: float = 0.0
    last: str = ""
    tests: Mapping[str, Mapping[str, Any]] | None = None


def checks(output: Path) -> list[Check]:
    """All of them, first those that matter most; what is measured goes to a folder."""
    transport = PACKAGES / "tensor-transport" / "tests"
    groups = transport / "process_groups"
    measured = [str(ROOT / "benchmarks/harness.py"), "gpu", "--output", str(output)]
    program = [str(ROOT / "examples/grpo/run.py"), "--quick", "--output"]
    plain = ("--generator", "transformers", "--no-environments")
    models = ["transformers"]
    turns = [str(TOGETHER / f"test_{name}.py") for name in ("colocated", "generation_routes")]
    updates = str(TOGETHER / "test_device_updates.py")
    others = (str(TOGETHER / "on_vllm"), updates, *turns)
    return [
        _tests("tests-transport", transport, "--ignore", str(groups), limit_s=240),
        _tests("tests-updates", TOGETHER, only=[updates], limit_s=300),
        _tests("tests-turns", TOGETHER, only=turns, limit_s=240, needs=models),
        _tests("tests-vllm", TOGETHER / "on_vllm", limit_s=600, needs=["vllm"]),
        *(_tests(f"tests-{name}", PACKAGES / name / "tests", limit_s=90) for name in _OTHERS),
        _tests("tests-together", TOGETHER, *(f"--ignore={other}" for other in others)),
        Check(
            "grpo-plain",
            [*program, str(output / "grpo-plain"), "--gpus", "1", *plain],
            limit_s=180,
            needs=[*models, "matplotlib"],
        ),
        Check("grpo-one-gpu", [*program, str(output / "grpo-1"), "--gpus", "1"], 600, needs=["uv"]),
        Check("grpo-two-gpus", [*program, str(output / "grpo-2"), "--gpus", "2"], 600, 2, ["uv"]),
        Check("bench", measured, limit_s=150, alone=True),
        _tests("tests-nccl", transport, only=[str(groups)], limit_s=420, alone=True),
    ]


_OTHERS = ("cluster-core", "worker-groups", "venv-manager")


def _tests(
    name: str, folder: Path, *more: str, only: Sequence[str] = (), needs: Sequence[str] = (), **how: Any
) -> Check:
    options = "-m gpu -p no:cacheprovider -p tests_told --timeout=150 --tb=short -rs"
    options += " --continue-on-collection-errors"
    words = ("-m", "pytest", *options.split(), *(only or [str(folder)]), *more)
    inner = [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]
    return Check(
        name, words, needs=("pytest", *needs), path=[*inner, TELLING], ends=(0, NOTHING_TO_RUN), **how
    )


def missing(check: Check, devices: int) -> str:
    """What a check lacks here; empty if nothing."""
    if devices < check.devices:
        return f"needs {check.devices} GPU(s), and {devices} are here"
    lacking = [need for need in check.needs if not importlib.util.find_spec(need) and not shutil.which(need)]
    return f"needs {', '.join(lacking)}" if lacking else ""


def run(check: Check, folder: Path, limit_s: float | None = None, say: Say = silent) -> Ended:
    """Run a check to its end, or to its limit; its log and what became of its tests are in the folder."""
    log, told, start = folder / f"{check.name}.log", folder / f"{check.name}.tests", time.monotonic()
    seen = tests_told.read(told)
    with log.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, *check.command],
            stdout=written,
            stderr=subprocess.STDOUT,
            env={**_environment(check), "TESTS_TOLD": str(told)},
            start_new_session=True,
        )
        ends = [start + (check.limit_s if limit_s is None else limit_s)]
        ends.append(ends[0] + GRACE_S)
        while (status := process.poll()) is None and time.monotonic() < ends[-1]:
            if len(ends) == 2 and time.monotonic() >= ends[0]:
                # pytest and the programs clear up, and say what they know.
                process.send_signal(signal.SIGINT)
                del ends[0]
            seen = _say_news(check, seen, told, say)
            time.sleep(0.2)
    is_late = len(ends) == 1
    _kill(process)
    seen = _say_news(check, seen, told, say)
    lines = log.read_text(errors="replace").strip().splitlines()
    outcome: Outcome = "late" if is_late else "passed" if status in check.ends else "failed"
    return Ended(check.name, outcome, time.monotonic() - start, lines[-1] if lines else "", seen or None)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of it, with all that it has started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _say_news(check: Check, seen: Mapping[str, Any], told: Path, say: Say) -> Mapping[str, Any]:
    now = tests_told.read(told)
    for test, found in now.items():
        if found != seen.get(test) and found["outcome"] != "begun":
            lines = found["why"].strip().splitlines()
            last = f": {next((line for line in lines if line.startswith('E ')), lines[-1])}" if lines else ""
            say(f"{check.name}: {found['outcome']} {test.rpartition('/')[2]}, {found['seconds']} s{last}")
    return now


def _environment(check: Check) -> Mapping[str, str]:
    path = os.pathsep.join([*map(str, check.path), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "PYTHONPATH": path.rstrip(os.pathsep),
        "PYTHONUNBUFFERED": "1",
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


def kept(folder: Path, output: Path, again: Collection[str], *, passed: bool) -> list[Ended]:
    """What is known by an earlier run, whose logs and lines of tests go along to the new one's folder.

    Args:
        folder: The earlier run's.
        output: The new one's.
        again: The checks that are to run now: what became of them is known no longer.
        passed: But of those of them that have passed, which need not.
    """
    found = folder / "checks.json"
    ended = [Ended(**each) for each in json.loads(found.read_text())["checks"]] if found.exists() else []
    output.mkdir(parents=True, exist_ok=True)
    for path in sorted([*folder.glob("*.tests"), *folder.glob("*.log")]):
        if not (output / path.name).exists():
            shutil.copyfile(path, output / path.name)
    return [one for one in ended if one.name not in again or (passed and one.outcome == "passed")]


def run_all(
    chosen: Sequence[Check],
    devices: Sequence[str],
    folder: Path,
    at_once: int = 1,
    *,
    within_s: float = float("inf"),
    before: Sequence[Ended] = (),
    say: Say = silent,
) -> list[Ended]:
    """What became of each check, which is written down after each of them."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"machine": machine(), "devices": list(devices), "versions": versions()}
    until, ended, writing = time.monotonic() + within_s, list(before), threading.Lock()

    def end(check: Check) -> None:
        left_s = until - time.monotonic() - GRACE_S
        lack = missing(check, len(devices)) or ("no time is left" if left_s < LEAST_S else "")
        one = Ended(check.name, "not run", last=lack)
        if not lack:
            say(f"{check.name}: begins")
            one = run(check, folder, min(check.limit_s, left_s), say)
        say(f"{check.name}: {one.outcome}, {one.seconds:.0f} s: {one.last}")
        with writing:
            ended.append(one)
            content = {**about, "checks": [asdict(each) for each in ended]}
            (folder / "checks.json").write_text(json.dumps(content, indent=2) + "\n")

    with ThreadPoolExecutor(at_once) as pool:
        for alone in (False, True):
            of_these = [check for check in chosen if check.alone == alone]
            list(pool.map(end, of_these) if not alone else map(end, of_these))
    return ended


def show(ended: Sequence[Ended], console: Console) -> None:
    """A table of what became of them."""
    table = Table("check", "outcome", "s", "tests", "last line")
    for one in ended:
        outcomes = [found["outcome"] for found in (one.tests or {}).values()]
        tests = ", ".join(f"{outcomes.count(each)} {each}" for each in sorted(set(outcomes)))
        table.add_row(one.name, one.outcome, f"{one.seconds:.0f}", tests, one.last)
    console.print(table)


def main() -> int:
    """Run what this machine can; 1 if anything failed, or nothing could be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="names of --list; all unless given")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu", help="folder of logs and figures")
    parser.add_argument("--within", type=float, default=12.0, metavar="MINUTES", help="for all together")
    parser.add_argument("--at-once", type=int, default=4 if (os.cpu_count() or 1) >= 12 else 1)
    parser.add_argument(
        "--resume", type=Path, nargs="?", const=Path(), metavar="FOLDER", help="or the output"
    )
    parser.add_argument("--list", action="store_true", help="say what would run, and what it lacks here")
    options, console = parser.parse_args(), Console()
    known = {check.name: check for check in checks(options.output)}
    if unknown := sorted(set(options.checks) - set(known)):
        parser.error(f"no such check: {', '.join(unknown)}; there are {', '.join(known)}")
    if options.resume is not None and not options.resume.is_dir():
        parser.error(f"{options.resume} is no folder of results: names of checks come before --resume")
    chosen, devices = [known[name] for name in options.checks or known], device_names()
    if options.list:
        for check in chosen:
            console.print(f"{check.name}: {missing(check, len(devices)) or 'would run'}", soft_wrap=True)
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Where this is ignored, checks would ignore it.
    if options.resume is None:
        for check in chosen:
            (options.output / f"{check.name}.tests").unlink(missing_ok=True)
    earlier = options.resume if options.resume is not None and options.resume.name else options.output
    names, resumes = {check.name for check in chosen}, options.resume is not None
    before = kept(earlier, options.output, names, passed=resumes)
    chosen = [check for check in chosen if check.name not in {one.name for one in before}]
    how = {"within_s": 60 * options.within, "before": before, "say": lambda line: print(line, flush=True)}
    ended = run_all(chosen, devices, options.output, options.at_once, **how)
    show(ended, console)
    outcomes = {one.outcome for one in ended}
    return int(bool(outcomes & {"failed", "late"}) or outcomes <= {"not run"})


if __name__ == "__main__":
    sys.exit(main())
