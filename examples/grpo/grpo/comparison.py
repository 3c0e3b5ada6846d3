"""The picture of a run in turns beside one in which generators and trainer do not wait for each other."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo.pace import Pace
from grpo.report import FAINT, HELD_OUT, INK, TRAIN

COLOURS = (TRAIN, HELD_OUT)
WIDTH = 0.4


def write_comparison(paces: Sequence[Pace], about: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `async.png` and `async.json`; their paths."""
    picture, figures = folder / "async.png", folder / "async.json"
    draw_comparison(paces, about).savefig(picture, dpi=160)
    content = {**about, "paces": [pace.as_dict() for pace in paces]}
    figures.write_text(json.dumps(content, indent=1) + "\n")
    return [picture, figures]


def draw_comparison(paces: Sequence[Pace], about: Mapping[str, Any]) -> Figure:
    """Held-out reward by the clock, throughput, staleness and idle time."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    ((reward, speed), (staleness, idle)) = figure.subplots(2, 2, width_ratios=(3, 2))
    figure.suptitle("GRPO in turns, and with generation going on meanwhile", fontsize=14, color=INK)
    reward.set_title(str(about.get("title", "")), fontsize=9, color="#666666")
    _draw_reward(reward, paces)
    _draw_bars(speed, {"": [pace.samples_per_s for pace in paces]}, "completions learnt from, per second")
    behind = sorted({age for pace in paces for age in pace.staleness})
    shares = {
        str(age): [pace.staleness.get(age, 0) / sum(pace.staleness.values()) for pace in paces]
        for age in behind
    }
    _draw_bars(staleness, shares, "share of prompts")
    staleness.set_xlabel("versions behind when learnt from")
    _draw_bars(idle, {who: [pace.idle[who] for pace in paces] for who in paces[0].idle}, "idle share of time")
    for axes in (staleness, idle):
        axes.set_ylim(0, 1.08)
    for axes in (reward, speed, staleness, idle):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure


def _draw_reward(axes: Axes, paces: Sequence[Pace]) -> None:
    for pace, colour in zip(paces, COLOURS, strict=True):
        at, found = zip(*pace.rewards, strict=True)
        axes.plot(at, found, color=colour, linewidth=2, marker="o", markersize=4, label=pace.name)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("seconds of GRPO")
    axes.set_ylabel("held-out exact match")
    axes.legend(frameon=False, loc="lower right")


def _draw_bars(axes: Axes, groups: Mapping[str, Sequence[float]], title: str) -> None:
    """Bars side by side in each group, one per pace, with their values."""
    for number, colour in enumerate(COLOURS):
        at = [place + (number - 0.5) * WIDTH for place in range(len(groups))]
        bars = axes.bar(at, [values[number] for values in groups.values()], width=WIDTH, color=colour)
        labels = [_label(values[number]) for values in groups.values()]
        axes.bar_label(bars, labels, fontsize=8, color=INK)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(title)


def _label(value: float) -> str:
    return f"{value:.0%}" if value <= 1 else f"{value:,.0f}"
