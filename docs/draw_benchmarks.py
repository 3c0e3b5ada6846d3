"""Draw the figures of `benchmarks/results` for their page; `--check` says whether that is current.

Each SVG carries a digest of what it was drawn of, so that the check needs no matplotlib and no equal fonts.
"""

import argparse
import hashlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
ASSETS = ROOT / "docs" / "assets"
MARKERS = ("<!-- drawn by docs/draw_benchmarks.py -->", "<!-- end -->")
GREY, MET, MISSED = "#808892", "#2a9d8f", "#e76f51"  # readable on white and on black


def suites() -> dict[str, list[dict[str, Any]]]:
    """Rows of each suite, by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def share(row: dict[str, Any], value: float) -> float:
    """How much of its goal a value uses up: 1 is just met, less is better."""
    part, whole = (value, row["goal"]) if row["better"] == "lower" else (row["goal"], value)
    return part / whole if whole else (0.0 if part == whole else math.inf)


def number(value: float | None, unit: str = "") -> str:
    """A figure for people."""
    if value is None:
        return ""
    if value == int(value) or abs(value) >= 100:
        short = f"{value:,.0f}"
    else:
        short = f"{value:.4f}" if 0.99 < abs(value) < 1 else f"{value:.3g}"
    return f"{short} {unit}".strip()


def chart_of(suite: str) -> Path:
    """Where a suite's chart lies."""
    return ASSETS / f"benchmarks-{suite}.svg"


def digest(rows: list[dict[str, Any]]) -> str:
    """What a chart depends on: its rows, and how they are drawn."""
    script = re.search(r"(?s)^def draw\(.*?(?=^def )", Path(__file__).read_text(), re.MULTILINE)
    drawn = json.dumps(rows, sort_keys=True) + (script[0] if script else "")
    return hashlib.sha256(drawn.encode()).hexdigest()


def draw(suite: str, rows: list[dict[str, Any]]) -> None:
    """Bars of the figures that have a goal: how much of it is used, and the figure itself."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "raycrew"
    goals = [row for row in rows if row["goal"] is not None]
    figure, axes = plt.subplots(figsize=(9.5, 0.36 * len(goals) + 1.0))
    for place, row in enumerate(goals):
        used = min(share(row, row["value"]), 1.5)
        colour = MET if row["met"] else MISSED
        axes.barh(place, used, height=0.62, color=colour)
        text = f"{number(row['value'], row['unit'])}   (goal {number(row['goal'])})"
        axes.text(max(used, 1.0) + 0.03, place, text, va="center", fontsize=8, color=GREY)
    axes.axvline(1.0, color=GREY, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(goals)), [row["name"] for row in goals], fontsize=8, color=GREY)
    axes.set_xticks([0, 0.5, 1.0], ["0", "half of the goal", "goal"], fontsize=8, color=GREY)
    axes.set_xlim(0, 1.9)
    axes.invert_yaxis()
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)
    described = f"{suite}: share of each goal that is used; drawn of {digest(rows)}"
    figure.savefig(
        chart_of(suite),
        transparent=True,
        bbox_inches="tight",
        metadata={"Date": None, "Creator": None, "Description": described},
    )
    plt.close(figure)
    svg = chart_of(suite).read_text()
    chart_of(suite).write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


def section(suite: str, rows: list[dict[str, Any]]) -> str:
    """A suite's part of the page."""
    machines = ", ".join(sorted({row["machine"] for row in rows}))
    versions = rows[0]["versions"]
    lines = [
        f"## {suite}",
        "",
        f"Measured on {machines}, Python {versions['python']}, Ray {versions['ray']}, "
        f"torch {versions['torch']}: `nox -s bench -- {suite}`.",
        "",
        f"![{suite}: how much of each goal is used](assets/benchmarks-{suite}.svg)",
        "",
        "| figure | measured | spread | compared with | goal |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = (number(end) for end in row["spread"])
        bound = (
            "" if row["goal"] is None else f"{'≤' if row['better'] == 'lower' else '≥'} {number(row['goal'])}"
        )
        state = bound if row["met"] is not False else f"**{bound}, missed**"
        measured = number(row["value"], row["unit"])
        against = row["baseline"] if row["baseline"] != "-" else ""
        lines.append(f"| {row['name']} | {measured} | {low} to {high} | {against} | {state} |")
    return "\n".join(lines)


def page_with(sections: list[str]) -> str:
    """The page with its drawn part replaced."""
    start, end = MARKERS
    before, _, rest = PAGE.read_text().partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n\n" + "\n\n".join(sections) + f"\n\n{end}{after}"


def stale() -> list[str]:
    """What is not drawn of today's results."""
    found = suites()
    old = [
        suite
        for suite, rows in found.items()
        if not chart_of(suite).is_file() or digest(rows) not in chart_of(suite).read_text()
    ]
    wanted = page_with([section(suite, rows) for suite, rows in found.items()])
    return old + ([PAGE.name] if wanted != PAGE.read_text() else [])


def main() -> int:
    """Draw, or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        if old := stale():
            print(f"not drawn of today's results: {', '.join(old)}; run python docs/draw_benchmarks.py")
        return bool(old)
    for suite, rows in suites().items():
        draw(suite, rows)
    PAGE.write_text(page_with([section(suite, rows) for suite, rows in suites().items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
