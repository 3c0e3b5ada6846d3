"""How long each part of a run's start took."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.table import Table

from raycrew.worker_groups import StartupReport

Rows = list[tuple[str, float]]


class StartClock:
    """Seconds of what a run does before its first round, one after the other.

    Args:
        clock: In seconds.

    Attributes:
        seconds: By phase, how long it took.
        draw: Surrounds each phase, given its name: `Timeline.span`, say.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self.draw: Callable[[str], AbstractContextManager[object]] = nullcontext
        self._clock = clock

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what is done in this block; if there was one of this name, that counts, too."""
        start = self._clock()
        with self.draw(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - start


def start_rows(seconds: dict[str, float], reports: Iterable[StartupReport], among: str) -> Rows:
    """The rows of a start's table: each phase, and below one of them the groups that it started."""
    rows: Rows = []
    for phase, took in seconds.items():
        rows.append((phase, took))
        if phase == among:
            rows += [(f"  {_describe(report)}", report.total_s) for report in reports]
    return [*rows, ("all", sum(seconds.values()))]


def start_table(rows: Rows) -> Table:
    """These rows, for people."""
    table = Table(box=None, header_style="bold", padding=(0, 2))
    table.add_column("start")
    table.add_column("s", justify="right")
    for what, seconds in rows:
        table.add_row(what, f"{seconds:.1f}")
    return table


def _describe(report: StartupReport) -> str:
    """A group, and what took the slowest of its workers longest."""
    slowest = sorted(((seconds, phase) for phase, (seconds, _) in report.slowest().items()), reverse=True)
    return f"{report.group_name}: {', '.join(f'{phase} {seconds:.1f}' for seconds, phase in slowest[:3])}"
