"""Do the tests notice? Small mutations of the pure modules, each run against the tests of that module.

`nox -s mutants -- [--count N] [--seed S] [MODULE …]` takes N mutations of each module (an operator, a bound,
a number, a condition), runs them in a copy of the packages, and prints those that no test noticed. A survivor
is either killed by a test of the promise that it breaks, or listed in `equivalent.toml` with the reason why
nobody could notice.
"""

import argparse
import os
import random
import shlex
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.commands import execute, init
from cosmic_ray.config import ConfigDict
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

ROOT = Path(__file__).parent.parent
EQUIVALENT = Path(__file__).parent / "equivalent.toml"
AIM = 0.95
# `|` joins types far more often than it joins sets or bits here.
SKIPPED_OPERATORS = ("BitOr", "ExceptionReplacer", "RemoveDecorator")

# Module (below the package's import name) and the tests that stand for it (below the package's tests).
TARGETS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "cluster-core": {
        "_planning/plan": ("planning/test_plan.py",),
        "_planning/bundle_packing": ("planning/test_plan.py",),
        "_placement/options": ("placement/test_options.py",),
        "_planning/segments": ("planning/test_segments.py", "planning/test_plan.py"),
        "_placement/ledger": ("test_testing.py",),
        "_placement/returning": ("placement/test_returning.py",),
        "_connection/environment": ("connection/test_environment.py",),
        "_devices/binding": ("devices/test_devices.py",),
        "_topology": ("test_topology.py", "planning/test_plan.py"),
    },
    "worker-groups": {
        "_calls/dispatch": ("calls/test_dispatch.py",),
        "_calls/results": ("test_testing.py", "calls/test_async.py"),
        "_calls/tasks": ("test_testing.py", "calls/test_async.py"),
        "_life/states": ("life/test_states.py",),
        "_life/budget": ("life/test_budget.py",),
        "_health/family": ("health/test_family.py",),
        "_ranks": ("test_ranks.py",),
        "_worker/options": ("worker/test_options.py",),
        "sharding": ("test_sharding.py",),
        "balancing/_strategies": ("balancing/test_balancing_strategies.py",),
        "fan_out/_batches": ("fan_out/test_fan_out_batches.py",),
        "fan_out/_processes/journal": ("fan_out/test_fan_out_journal.py",),
    },
    "tensor-transport": {
        "_rows/views": ("rows/test_view_values.py", "rows/test_views.py"),
        "_rows/indexing": ("rows/test_indexing.py", "rows/test_view_values.py"),
        "_bytes/codec": ("bytes/test_codec.py",),
        "_bytes/folding": ("bytes/test_fold.py",),
        "packing/_fitting": ("packing/test_values.py", "packing/test_packing.py"),
        "packing/_bins": ("packing/test_values.py", "packing/test_packing.py"),
        "packing/_plan": ("packing/test_values.py", "packing/test_plan.py"),
        "transports/_choosing/choice": ("transports/test_choice.py",),
        "weights/_directory/record": (
            "weights/directory/test_record.py",
            "weights/directory/test_directory.py",
        ),
        "weights/deltas/_codec": ("weights/deltas/test_delta_codec.py",),
        "weights/resharding/_planning/agreement": ("weights/resharding/test_reshard_plan.py",),
        "weights/resharding/_planning/needs": ("weights/resharding/test_reshard_plan.py",),
        "weights/resharding/_planning/plan": ("weights/resharding/test_reshard_plan.py",),
        "weights/_update/manifest": ("weights/update/test_checksum.py", "weights/test_weights.py"),
    },
    "venv-manager": {
        "_spec/digest": ("spec/test_digest.py", "spec/test_spec.py"),
        "_spec/spec": ("spec/test_spec.py", "spec/test_digest.py"),
        "_local/sources": ("local/test_sources.py", "spec/test_digest.py"),
        "_spec/given": ("spec/test_digest.py", "local/test_lock_places.py"),
        "_local/listed": ("local/test_listed.py",),
        "_local/credentials": ("uv/test_access.py", "uv/test_secrets.py"),
        "_spec/variables": ("uv/test_secrets.py", "spec/test_digest.py", "uv/test_access.py"),
        "_spec/uv_settings": ("spec/test_digest.py", "uv/test_configuration.py"),
        "_uv/uv_run": ("spec/test_spec.py", "uv/test_requirement_forms.py"),
        "_store/trust": ("store/test_trust.py",),
        "_local/fingerprints": ("local/test_lock_places.py", "spec/test_digest.py"),
        "_build/inventory": ("store/test_upkeep.py",),
    },
}


@dataclass(frozen=True)
class Survivor:
    """A mutation that no test noticed: the line as it is, and as it was made."""

    module: str
    before: str
    after: str


def survivor(module: str, diff: str) -> Survivor:
    """The changed lines of a diff."""
    lines = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    before = " ".join(line[1:].strip() for line in lines if line[0] == "-")
    after = " ".join(line[1:].strip() for line in lines if line[0] == "+")
    return Survivor(module, before, after)


def known_equivalents() -> set[Survivor]:
    """The mutations that nobody can notice."""
    entries = tomllib.loads(EQUIVALENT.read_text()).get("equivalent", [])
    return {Survivor(entry["module"], entry["before"], entry["after"]) for entry in entries}


def keep_sample(work: WorkDB, count: int, seed: int) -> None:
    """Skip all mutations but some, chosen by the seed and in the same order each time."""
    items = sorted(
        work.work_items,
        key=lambda item: (
            item.mutations[0].start_pos,
            item.mutations[0].operator_name,
            item.mutations[0].occurrence,
        ),
    )
    wanted = [
        item
        for item in items
        if not any(operator in item.mutations[0].operator_name for operator in SKIPPED_OPERATORS)
    ]
    kept = {item.job_id for item in random.Random(seed).sample(wanted, min(count, len(wanted)))}
    skipped = [item.job_id for item in items if item.job_id not in kept]
    work.set_multiple_results(skipped, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))


def test_command(copy: Path, package: str, tests: Sequence[str]) -> str:
    """The tests of one module, in the copy, ended at the first failure."""
    folder = copy / "packages" / package / "tests"
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        str(copy / "pyproject.toml"),
        "--rootdir",
        str(copy),
    ]
    return shlex.join([sys.executable, "-m", "pytest", *options, *(str(folder / test) for test in tests)])


def outcomes(copy: Path, package: str, module: str, count: int, seed: int) -> Iterator[tuple[bool, str]]:
    """Per mutation of one module: whether it was noticed, and its diff."""
    source = copy / "packages" / package / "src" / "raycrew" / package.replace("-", "_") / f"{module}.py"
    config = ConfigDict(
        {
            "timeout": 300.0,
            "test-command": test_command(copy, package, TARGETS[package][module]),
            "distributor": {"name": "local"},
        }
    )
    with use_db(str(copy / f"{package}-{module.replace('/', '-')}.sqlite")) as work:
        init([source], work, {})
        keep_sample(work, count, seed)
        execute(work, config)
        for _, result in work.results:
            if result.worker_outcome is WorkerOutcome.NORMAL:
                yield result.test_outcome is not TestOutcome.SURVIVED, result.diff or ""


def prepare(copy: Path) -> None:
    """A copy of what the tests need, found before what is installed."""
    shutil.copytree(ROOT / "packages", copy / "packages", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, copy)
    found = [*copy.glob("packages/*/src"), *copy.glob("packages/*/tests"), *copy.glob("packages/*/tests/**/")]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, found))


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="such as _planning/plan (default: all)")
    parser.add_argument("--count", type=int, default=30, help="mutations per module (default 30)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sample; 1 where fewer than 95 % of what can be noticed was noticed."""
    chosen = options(arguments)
    equivalent, survivors, totals = known_equivalents(), [], [0, 0]
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for package, modules in TARGETS.items():
            for module in modules:
                if chosen.modules and module not in chosen.modules:
                    continue
                seen = list(outcomes(Path(folder), package, module, chosen.count, chosen.seed))
                missed = [survivor(f"{package}/{module}", diff) for noticed, diff in seen if not noticed]
                real = [each for each in missed if each not in equivalent]
                tried, noticed = len(seen) - len(missed) + len(real), len(seen) - len(missed)
                print(f"{package + '/' + module:<44} noticed {noticed:>3} of {tried:>3}", flush=True)
                survivors += real
                totals = [totals[0] + noticed, totals[1] + tried]
    for each in survivors:
        print(f"\n{each.module}\n  - {each.before}\n  + {each.after}")
    print(f"\nnoticed {totals[0]} of {totals[1]}")
    return int(not totals[1] or totals[0] / totals[1] < AIM)


if __name__ == "__main__":
    sys.exit(main())
