"""What a person sees while a run goes on: live on a terminal, a line now and then elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from grpo.history import Evaluation, History, StepRecord

COLOURS = ("cyan", "yellow", "magenta", "green")
BAR_WIDTH = 20
ROWS = 8


class RunDisplay:
    """Shows a run's history as it grows.

    Args:
        console: Where to show it.
        history: What to show; read at each `update`.
        total: How many steps the run has.
    """

    def __init__(self, console: Console, history: History, total: int) -> None:
        self._console = console
        self._history = history
        self._progress = Progress(
            TextColumn("GRPO"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._progress.add_task("GRPO", total=total)
        self._shown: Evaluation | None = history.evaluations[-1] if history.evaluations else None
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self) -> None:
        """Show the step that was just added; on a terminal all of them stay in view until the end."""
        steps, evaluations = self._history.steps, self._history.evaluations
        done = steps[-1].step if steps else 0
        self._progress.update(self._task, completed=done)
        if (last := evaluations[-1]) is not self._shown:
            self._shown = last
            now = _describe(steps[last.step - 1]) if last.step else ""
            self._console.print(f"step {last.step:>3}  held-out {last.reward:.2f}{now}")

    def _render(self) -> RenderableType:
        steps = self._history.steps[-ROWS:]
        if not steps:
            return self._progress
        return Group(_table(steps), _split(steps[-1]), self._progress)


def _describe(step: StepRecord) -> str:
    return (
        f"  train {step.reward:.2f}  KL {step.kl:.2f}  |Δlogp| {step.logprob_difference:.0e}  "
        f"{step.tokens_per_s:,.0f} tokens/s"
    )


def _table(steps: list[StepRecord]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2))
    for title in ("step", "reward", "KL", "max |Δlogp|", "weights", "tokens/s", "s/step"):
        table.add_column(title, justify="right")
    for step in steps:
        table.add_row(
            str(step.step),
            f"{step.reward:.3f}",
            f"{step.kl:.3f}",
            f"{step.logprob_difference:.1e}",
            f"v{step.weight_version}",
            f"{step.tokens_per_s:,.0f}",
            f"{sum(step.seconds.values()):.2f}",
        )
    return table


def _split(step: StepRecord) -> Text:
    """The last step's time as a bar of coloured parts."""
    total = max(sum(step.seconds.values()), 1e-9)
    bar, legend = Text("  "), Text()
    for phase, colour in zip(step.seconds, COLOURS, strict=False):
        bar.append("█" * round(BAR_WIDTH * step.seconds[phase] / total), style=colour)
        legend.append(f"  {phase} {step.seconds[phase] * 1000:.0f} ms", style=colour)
    return bar + legend
