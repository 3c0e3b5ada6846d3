"""The files that a run leaves: its curves as a picture, and everything it measured as JSON."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo.errors import ExampleError
from grpo.history import History

INK, FAINT = "#222222", "#d9d9d9"
TRAIN, HELD_OUT, DIVERGENCE, DIFFERENCE = "#7aa6c2", "#c1440e", "#5b4b8a", "#3c8d5a"
PHASE_COLOURS = ("#4c78a8", "#f2a65a", "#7a5195", "#59a14f")


def prepare_folder(folder: Path) -> Path:
    """Make the output folder, and see that it can be written before any time is spent.

    Raises:
        ExampleError: It cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ExampleError(
            f"cannot write to the output folder {folder}: {error.strerror or error}"
        ) from error
    return folder


def write_report(history: History, about: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `reward.png` and `metrics.json`; their paths."""
    picture, metrics = folder / "reward.png", folder / "metrics.json"
    draw(history, about).savefig(picture, dpi=160)
    content = {
        **about,
        "evaluations": [asdict(evaluation) for evaluation in history.evaluations],
        "seconds": history.phase_totals(),
        "events": [asdict(event) for event in history.events],
        "steps": [{**asdict(step), "tokens_per_s": step.tokens_per_s} for step in history.steps],
    }
    metrics.write_text(json.dumps(content, indent=1) + "\n")
    return [picture, metrics]


def draw(history: History, about: Mapping[str, Any]) -> Figure:
    """Reward, divergence and time split over the steps of a run."""
    figure = Figure(figsize=(8, 8), layout="constrained")
    reward, divergence, time = figure.subplots(3, 1, sharex=True, height_ratios=(5, 3, 3))
    figure.suptitle(f"GRPO on raycrew: {history.summary}", fontsize=14, color=INK)
    reward.set_title(str(about.get("title", "")), fontsize=9, color="#666666")
    _draw_reward(reward, history)
    _draw_divergence(divergence, history)
    _draw_time(time, history)
    time.set_xlabel("step")
    _mark_events(reward, history)
    for axes in (reward, divergence, time):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
    return figure


def _draw_reward(axes: Axes, history: History) -> None:
    steps, rewards = [s.step for s in history.steps], [s.reward for s in history.steps]
    axes.plot(steps, rewards, color=TRAIN, alpha=0.4, linewidth=1)
    axes.plot(steps, _smooth(rewards), color=TRAIN, linewidth=2, label="train, sampled (5-step mean)")
    axes.plot(
        [e.step for e in history.evaluations],
        [e.reward for e in history.evaluations],
        color=HELD_OUT,
        linewidth=2,
        marker="o",
        markersize=5,
        label="held-out, greedy",
    )
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("exact match")
    axes.legend(frameon=False, loc="lower right")


def _mark_events(axes: Axes, history: History) -> None:
    """A line at each round in which a worker died."""
    for event in history.events:
        axes.axvline(event.step, color=INK, linewidth=0.8, linestyle=":")
        text = f" {event.worker} died"
        axes.text(event.step, 0.25, text, rotation=90, fontsize=7, color=INK, ha="right", va="bottom")


def _draw_divergence(axes: Axes, history: History) -> None:
    steps = [s.step for s in history.steps]
    axes.plot(steps, [s.kl for s in history.steps], color=DIVERGENCE, linewidth=1.5)
    axes.set_ylabel("KL to reference\n(nats per token)", color=DIVERGENCE)
    axes.set_ylim(bottom=0)
    other = axes.twinx()
    differences = [max(s.logprob_difference, 1e-9) for s in history.steps]
    other.plot(steps, differences, color=DIFFERENCE, linewidth=1, linestyle="--")
    other.set_yscale("log")
    other.set_ylim(1e-9, 100)
    other.set_ylabel("max |Δ log p|\ngenerator, trainer", color=DIFFERENCE)
    other.spines["top"].set_visible(False)


def _draw_time(axes: Axes, history: History) -> None:
    steps = [s.step for s in history.steps]
    layers = [[s.seconds[phase] for s in history.steps] for phase in history.phases]
    axes.stackplot(steps, *layers, labels=history.phases, colors=PHASE_COLOURS, alpha=0.85)
    axes.set_ylabel("seconds per step")
    axes.set_ylim(0, 1.25 * max(sum(parts) for parts in zip(*layers, strict=True)))
    axes.legend(frameon=False, ncols=len(history.phases), loc="upper right", fontsize=8)


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Mean of the last `width` values at each place."""
    windows = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]
