"""Measure ratios side by side in one process, print them as a table, keep them as JSON.

A suite is a module in this folder with `run(quick: bool) -> Iterable[Figure]`, of none where the machine
lacks what it measures. Each figure of a generator is kept as it comes.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Literal

from rich.console import Console
from rich.table import Table

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("ray", "torch", "numpy", "uv", "safetensors")


@dataclass(frozen=True)
class Figure:
    """One measured figure: a ratio, a time or a count, with what it is compared to.

    `spread` is (lowest, highest) over the kept samples; `goal` may be None where nothing is promised.
    """

    name: str
    value: float
    unit: str
    spread: tuple[float, float]
    baseline: str
    goal: float | None = None
    better: Literal["lower", "higher"] = "lower"
    samples: int = 1
    note: str = ""
    met: bool | None = field(init=False)

    def __post_init__(self) -> None:
        met = None
        if self.goal is not None:
            met = self.value <= self.goal if self.better == "lower" else self.value >= self.goal
        object.__setattr__(self, "met", met)


def seconds(fn: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def ratio(
    name: str,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    *,
    baseline: str,
    goal: float | None = None,
    better: Literal["lower", "higher"] = "lower",
    repeat: int = 7,
    warmup: int = 1,
    invert: bool = False,
    note: str = "",
) -> Figure:
    """Time both callables in turn (each returns its own seconds) and take the median of the paired ratios.

    The ratio is ours / theirs, or theirs / ours ("how many times faster") with `invert`.
    The order alternates, so that a drift of the machine hits both alike.
    """
    for _ in range(warmup):
        ours()
        theirs()
    samples = []
    for i in range(repeat):
        if i % 2:
            b, a = theirs(), ours()
        else:
            a, b = ours(), theirs()
        samples.append(b / a if invert else a / b)
    return figure(name, samples, unit="x", baseline=baseline, goal=goal, better=better, note=note)


def figure(
    name: str,
    samples: list[float],
    *,
    unit: str,
    baseline: str,
    goal: float | None = None,
    better: Literal["lower", "higher"] = "lower",
    note: str = "",
) -> Figure:
    """The median of `samples` as a figure."""
    return Figure(
        name,
        statistics.median(samples),
        unit,
        (min(samples), max(samples)),
        baseline,
        goal,
        better,
        len(samples),
        note,
    )


def versions() -> dict[str, str]:
    """Versions of what the figures depend on, where installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> str:
    """One line about the machine."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{platform.machine()}, {os.cpu_count()} cores, {gib:.0f} GiB"


def show(suite: str, figures: list[Figure], console: Console) -> None:
    """Print one suite's table; a missed goal is shown as missed."""
    table = Table(title=f"{suite} · {machine()}")
    for column in ("figure", "value", "spread", "goal", "met", "n", "against"):
        table.add_column(column, justify="left" if column in ("figure", "against") else "right")
    for f in figures:
        sign = "≤" if f.better == "lower" else "≥"
        goal = "" if f.goal is None else f"{sign} {f.goal:g}"
        met = {None: "", True: "[green]yes[/]", False: "[bold red]missed[/]"}[f.met]
        spread = f"{f.spread[0]:.3g}-{f.spread[1]:.3g}"
        table.add_row(f.name, f"{f.value:.3g} {f.unit}", spread, goal, met, str(f.samples), f.baseline)
    console.print(table)


def main() -> None:
    """`python benchmarks/harness.py SUITE ... [--quick] [--output FOLDER]`."""
    suites = sorted(
        p.stem.removeprefix("bench_").replace("_", "-") for p in RESULTS.parent.glob("bench_*.py")
    )
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"any of: {', '.join(suites)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: shows that a suite runs")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of the JSON files")
    args = parser.parse_args()
    if unknown := set(args.suites) - set(suites):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}; there are {', '.join(suites)}")
    console = Console(width=max(Console().width, 120))
    for suite in args.suites or suites:
        figures: list[Figure] = []
        try:
            for each in importlib.import_module(f"bench_{suite.replace('-', '_')}").run(args.quick):
                figures.append(each)
                write(suite, figures, args.output)
        finally:
            if figures:
                show(suite, figures, console)
        if not figures:
            console.print(f"{suite}: this machine has nothing to measure it with")


def write(suite: str, figures: list[Figure], folder: pathlib.Path) -> None:
    """Keep the figures that there are so far."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(f) | {"versions": versions(), "machine": machine()} for f in figures]
    (folder / f"{suite}.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
