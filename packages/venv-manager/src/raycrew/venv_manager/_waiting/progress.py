"""What a build is doing: shown on a terminal, logged elsewhere."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.markup import escape

logger = logging.getLogger(__name__)

Report = Callable[[str], None]


def silent(_text: str) -> None:
    """A report that goes nowhere."""


@contextmanager
def reporting(title: str) -> Iterator[Report]:
    """Show one line that changes, on a terminal; log each change where there is none.

    Where rich shows something else on the terminal already, each change is a line above that.
    """
    start = time.monotonic()
    if isinstance(sys.stderr, FileProxy):  # which older versions of rich take for no terminal
        yield changes(lambda text: sys.stderr.write(f"{title}: {text}\n"))
        return
    if not sys.stderr.isatty():
        yield changes(lambda text: logger.info("%s: %s (%.1f s)", title, text, time.monotonic() - start))
        return
    with Console(stderr=True).status(escape(title)) as status:

        def show(text: str) -> None:
            status.update(escape(f"{title}: {text} ({time.monotonic() - start:.0f} s)"))

        yield show


def changes(report: Callable[[str], object]) -> Report:
    """A report that passes on only what differs from the text before."""
    last = ""

    def changed(text: str) -> None:
        nonlocal last
        if text != last:
            last = text
            report(text)

    return changed
