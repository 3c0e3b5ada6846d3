"""A progress bar for those who watch."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.errors import LiveError
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

QUIET_S = 1.0
"""A call shorter than this shows nothing."""


@contextlib.contextmanager
def advancing(
    progress: bool | Progress, description: str, total: int | None
) -> Iterator[Callable[[bool], None]]:
    """Gives a function to call at every item's end, with whether it is good.

    Args:
        progress: False for none; True for a bar on a terminal's stderr; or a display of the caller's own.
        description: Text in front of the bar.
        total: Number of items, if known.
    """
    console = Console(stderr=True)
    if progress is False or (progress is True and not console.is_terminal):
        yield lambda _ok: None
        return
    if isinstance(progress, Progress):
        yield _counter(progress, description, total)
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    count, quiet_until, started = _counter(bar, description, total), time.monotonic() + QUIET_S, False

    def advance(ok: bool) -> None:
        nonlocal started
        count(ok)
        if not started and time.monotonic() > quiet_until:
            started = True
            with contextlib.suppress(LiveError):  # another display is running: leave the screen to it
                bar.start()

    try:
        yield advance
    finally:
        bar.stop()


def _counter(progress: Progress, description: str, total: int | None) -> Callable[[bool], None]:
    shown = escape(description)
    task = progress.add_task(shown, total=total)
    failed = 0

    def advance(ok: bool) -> None:
        nonlocal failed
        if not ok:
            failed += 1
            progress.update(task, description=f"{shown} [red]({failed} failed)[/]")
        progress.advance(task)

    return advance
