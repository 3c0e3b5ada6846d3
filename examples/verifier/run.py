"""Verify many small programs in parallel: `python examples/verifier/run.py [--count N] [--json FILE]`."""

import argparse
import json
import pathlib
import time
from collections import Counter

from rich.console import Console
from rich.table import Table
from sandbox import Verdict, verify
from submissions import PROGRAMS, make

from raycrew.cluster_core import init_ray
from raycrew.worker_groups import ItemError, close_fan_out, fan_out

STYLES = {"passed": "green", "wrong": "yellow", "raised": "yellow", "timeout": "red", "killed": "red"}


def main() -> None:
    """Make submissions, verify them, and show what became of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="number of submissions (default: 200)")
    parser.add_argument("--json", type=pathlib.Path, help="also write the counts to this file")
    options = parser.parse_args()
    if options.count < 1:
        parser.error("--count must be at least 1")
    submissions = make(options.count)
    with init_ray():
        try:
            fan_out(abs, [0])  # start the pool, so that the time below is that of the work
            started = time.perf_counter()
            # The sandbox ends a program after Limits.wall_s; timeout_s is the net below the sandbox itself.
            results = fan_out(verify, submissions, timeout_s=60, on_error="return")
            elapsed_s = time.perf_counter() - started
        finally:
            close_fan_out()
    outcomes: dict[str, Counter[str]] = {}
    details: dict[str, str] = {}
    for submission, result in zip(submissions, results, strict=True):
        status = result.status if isinstance(result, Verdict) else "refused"
        detail = result.detail if isinstance(result, Verdict) else str(result)
        outcomes.setdefault(submission.name, Counter())[status] += 1
        details.setdefault(submission.name, detail)
    show(outcomes, details, len(submissions), elapsed_s)
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=2) + "\n")
    unverified = [result for result in results if isinstance(result, ItemError)]
    Console().print(
        f"{len(unverified)} submission(s) could not be verified and get no reward, not a full one."
    )


def show(outcomes: dict[str, Counter[str]], details: dict[str, str], total: int, elapsed_s: float) -> None:
    """Print a row for each kind of program."""
    table = Table(title=f"{total} programs verified in {elapsed_s:.1f} s: {total / elapsed_s:.0f} per second")
    for column in ("program", "verdict", "count", "first thing that went wrong"):
        table.add_column(column, justify="right" if column == "count" else "left", overflow="fold")
    for name in [*PROGRAMS, "has no tests"]:
        for status, count in outcomes.get(name, Counter()).items():
            style = STYLES.get(status, "magenta")
            table.add_row(name, f"[{style}]{status}[/]", str(count), details[name])
    Console().print(table)


if __name__ == "__main__":
    main()
