"""How long each part of a group's start-up took, and its progress bar."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ray.exceptions import GetTimeoutError
from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from raycrew.worker_groups._health import Span, WorkerRecord
from raycrew.worker_groups._start.spec import GroupSpec
from raycrew.worker_groups.errors import WorkerStartTimeoutError

#: Phases in the order that a worker goes through them.
PHASES = ("environment", "placement", "process", "import", "init")


@dataclass(slots=True)
class StartupReport:
    """Seconds per phase of a group's start-up.

    Attributes:
        group_name: Name of the group.
        environment_s: Preparing the workers' environment and describing their class, once for all.
        workers: Per rank, the seconds of the phases placement, process, import and init.
        total_s: From the first to the last.
    """

    group_name: str
    environment_s: float = 0.0
    workers: dict[int, dict[str, float]] = field(default_factory=dict)
    total_s: float = 0.0

    def slowest(self) -> dict[str, tuple[float, int | None]]:
        """Per phase, the longest time and the rank that took it (None for the common first phase)."""
        found: dict[str, tuple[float, int | None]] = {"environment": (self.environment_s, None)}
        for phase in PHASES[1:]:
            rank = max(self.workers, key=lambda r: self.workers[r][phase])
            found[phase] = (self.workers[rank][phase], rank)
        return found

    def table(self) -> Table:
        """Median and slowest rank of each phase, for people."""
        workers = "1 worker" if len(self.workers) == 1 else f"{len(self.workers)} workers"
        title = f"start of {self.group_name}: {workers} in {self.total_s:.2f} s"
        table = Table(title=Text(title, style="table.title"))  # A group's name is no markup.
        for column in ("phase", "median s", "slowest s", "slowest rank"):
            table.add_column(column, justify="left" if column == "phase" else "right")
        for phase, (longest, rank) in self.slowest().items():
            median = longest if rank is None else _median([w[phase] for w in self.workers.values()])
            table.add_row(phase, f"{median:.2f}", f"{longest:.2f}", "" if rank is None else str(rank))
        return table

    def spans(self, end: float) -> list[Span]:
        """What is drawn of a start that was over at a moment, as far as these phases tell when each was."""
        start = end - self.total_s
        common = start + self.environment_s
        met = common + max((w["placement"] + w["process"] for w in self.workers.values()), default=0.0)
        spans = [
            Span(self.group_name, "start", "start", "start", start, end, {"ranks": len(self.workers)}),
            Span(self.group_name, "start", "environment", "environment", start, common),
        ]
        for rank, seconds in self.workers.items():
            for at, phases in ((common, PHASES[1:3]), (met, PHASES[3:])):
                for phase in phases:
                    until = min(end, at + seconds[phase])
                    spans.append(Span(self.group_name, f"rank {rank}", phase, "start", min(at, until), until))
                    at = until
        return spans

    def __rich__(self) -> Table:
        return self.table()


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


class StartupProgress:
    """Counts workers per step of the start-up; draws only on a terminal."""

    def __init__(self, group_name: str, n_workers: int, progress: Progress | None) -> None:
        self._progress = progress
        self._name = group_name
        self._task = None if progress is None else progress.add_task(group_name, total=n_workers)

    def step(self, what: str, names: Sequence[str] = ()) -> None:  # noqa: ARG002 - for those that tell them
        """Begin a step, which who is named has to do."""
        if self._progress is not None and self._task is not None:
            self._progress.reset(self._task, description=f"{self._name}: {what}")

    def located(self, workers: Sequence[WorkerRecord]) -> None:
        """It is known who the workers are, and where."""

    def advance(self, position: int = 0) -> None:  # noqa: ARG002
        """One worker has done the step: that with the name at this position."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task)


@contextmanager
def startup_progress(group_name: str, n_workers: int, shown: bool | None) -> Iterator[StartupProgress]:
    """A progress bar that goes away when the start-up is over; by default only on a terminal."""
    console = Console(stderr=True)
    if not (console.is_terminal if shown is None else shown):
        yield StartupProgress(group_name, n_workers, None)
        return
    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True)
    with suppress(LiveError):  # another display is running: leave the screen to it
        progress.start()
    try:
        yield StartupProgress(group_name, n_workers, progress)
    finally:
        progress.stop()


@contextmanager
def starting(spec: GroupSpec, n_workers: int) -> Iterator[StartupProgress]:
    """Show the progress of a start-up; where Ray itself does not answer, that was late, too."""
    try:
        with startup_progress(spec.name, n_workers, spec.options.progress) as progress:
            yield progress
    except GetTimeoutError as error:
        raise WorkerStartTimeoutError(f"{spec.name}: {error}", group_name=spec.name) from error


class Stopwatch:
    """Seconds since it was made, and between its laps."""

    def __init__(self) -> None:
        self.start = self._last = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        return seconds

    @property
    def total_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start
