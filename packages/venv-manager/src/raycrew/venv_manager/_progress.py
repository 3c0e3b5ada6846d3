"""What a build is doing: shown on a terminal, logged elsewhere."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

logger = logging.getLogger(__name__)

Report = Callable[[str], None]


def silent(_text: str) -> None:
    """A report that goes nowhere."""


@contextmanager
def reporting(title: str) -> Iterator[Report]:
    """Show one line that changes, on a terminal; log each change where there is none."""
    start = time.monotonic()
    if not sys.stderr.isatty():

        def log(text: str) -> None:
            logger.info("%s: %s (%.1f s)", title, text, time.monotonic() - start)

        yield log
        return
    with Console(stderr=True).status(escape(title)) as status:

        def show(text: str) -> None:
            status.update(escape(f"{title}: {text} ({time.monotonic() - start:.0f} s)"))

        yield show
