"""Do the tests notice? Small mutations of the pure modules, each run against the tests of that module.

`nox -s mutants -- [--count N] [--seed S] [MODULE …]` takes N mutations of each module (an operator, a bound,
a number, a condition, a returned value), runs them in a copy of the packages, and prints those that no test
noticed. A survivor is either killed by a test of the promise that it breaks, or listed in `equivalent.toml`
with the reason why nobody could notice.
"""

import argparse
import importlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mutations import Mutation, mutations
from targets import TARGETS
from trying import ENDLESS, UNNOTICED, Module, Trial

ROOT = Path(__file__).parent.parent
EQUIVALENT = Path(__file__).parent / "equivalent.toml"
NUMBER = re.compile(r"\s*-?\s*\b\d[\d_.]*(e-?\d+)?")
AIM = 0.95
# Slow to import, and no part of the packages: once for all forks.
PRELOADED = ("numpy", "torch", "ray", "hypothesis", "packaging", "aiohttp", "rich")
PYTEST = ("-q", "-s", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Survivor:
    """A mutation that no test noticed: the line as it is, and as it was made.

    Without `after`: any that changes nothing of the line but a number.
    """

    module: str
    before: str
    after: str = ""

    @property
    def is_of_a_number(self) -> bool:
        """Whether nothing but numbers are others."""
        return NUMBER.sub("0", self.before) == NUMBER.sub("0", self.after)


def known_equivalents() -> set[Survivor]:
    """The mutations that nobody can notice."""
    entries = tomllib.loads(EQUIVALENT.read_text()).get("equivalent", [])
    return {Survivor(entry["module"], entry["before"], entry.get("after", "")) for entry in entries}


def sample(copy: Path, package: str, name: str, count: int, seed: int) -> Module:
    """A module in the copy, with its tests and a sample of its mutations but those that nobody can notice."""
    folder = copy / "packages" / package
    source = folder / "src/raycrew" / package.replace("-", "_") / f"{name}.py"
    equivalent = known_equivalents()

    def is_known(mutation: Mutation) -> bool:
        found = Survivor(f"{package}/{name}", mutation.before, mutation.after)
        return found in equivalent or (found.is_of_a_number and replace(found, after="") in equivalent)

    made = [each for each in mutations(source.read_text(), count, seed) if not is_known(each)]
    return Module(source, [folder / "tests" / test for test in TARGETS[package][name]], made)


def prepare(copy: Path) -> None:
    """A copy of what the tests need, found before what is installed."""
    shutil.copytree(ROOT / "packages", copy / "packages", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, copy)
    found = [*copy.glob("packages/*/src"), *copy.glob("packages/*/tests"), *copy.glob("packages/*/tests/**/")]
    sys.path[:0] = map(str, found)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, found))
    os.environ["OMP_NUM_THREADS"] = "1"  # threads would not be there in a fork
    sys.dont_write_bytecode = True  # a mutation may be as long and as old as its original
    for name in filter(importlib.util.find_spec, PRELOADED):
        importlib.import_module(name)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="such as _planning/plan (default: all)")
    parser.add_argument("--count", type=int, default=30, help="mutations per module (default 30)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def tried(copy: Path, package: str, names: Sequence[str], chosen: argparse.Namespace) -> tuple[int, int]:
    """How many mutations of some modules of a package were noticed, and how many there were."""
    modules = {name: sample(copy, package, name, chosen.count, chosen.seed) for name in names}
    named = {module.source: f"{package}/{name}" for name, module in modules.items()}
    output = os.fdopen(os.dup(1), "w")

    def show(module: Module, mutation: Mutation, outcome: str) -> None:
        told = f"{named[module.source]}: {outcome}\n  - {mutation.before}\n  + {mutation.after}"
        print(told, file=output, flush=True)

    beside = copy.parent / "tmp"  # not within: a folder of a test has no project above it
    places = ["-c", str(copy / "pyproject.toml"), "--rootdir", str(copy), f"--basetemp={beside}"]
    found, failed = Trial([*PYTEST, *places], copy, show).outcomes(list(modules.values()))
    output.close()
    for test in failed:
        print(f"left out, as it fails without any mutation: {test}")
    for name, module in modules.items():
        outcomes = [outcome for each, outcome in found if each is module]
        noticed, endless = len(outcomes) - outcomes.count(UNNOTICED), outcomes.count(ENDLESS)
        late = f", {endless} of them by no end, or a crash" if endless else ""
        print(f"{package + '/' + name:<56} noticed {noticed:>4} of {len(outcomes):>4}{late}", flush=True)
    return sum(outcome != UNNOTICED for _, outcome in found), len(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sample; 1 where fewer than 95 % of what can be noticed was noticed."""
    chosen = options(arguments)
    totals: dict[str, tuple[int, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        prepare(copy)
        for package, targets in TARGETS.items():
            names = [name for name in targets if not chosen.modules or {name, package} & {*chosen.modules}]
            if names:
                totals[package] = tried(copy, package, names, chosen)
    totals["all"] = tuple(map(sum, zip(*totals.values(), strict=True)))
    for package, (noticed, made) in totals.items():
        print(f"{package:<56} noticed {noticed:>4} of {made:>4}")
    noticed, made = totals["all"]
    return int(not made or noticed / made < AIM)


if __name__ == "__main__":
    sys.exit(main())
