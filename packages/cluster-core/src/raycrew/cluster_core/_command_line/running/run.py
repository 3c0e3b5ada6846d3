"""`raycrew run`: a command beside a cluster."""

import io
import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console
from rich.text import Text

from raycrew.cluster_core._command_line.running.child import Child, CommandError, check_command
from raycrew.cluster_core._command_line.running.keeping import (
    Found,
    InterruptedStartError,
    Keeper,
    NoKeeperError,
)
from raycrew.cluster_core._command_line.running.signals import Signals
from raycrew.cluster_core._command_line.running.terminal import Terminal
from raycrew.cluster_core._command_line.running.wishes import FAILED, Order, read_order
from raycrew.cluster_core._command_line.terminal import Printable

_ROOM_S = 1.0


def run(arguments: Sequence[str], prog: str = "raycrew run") -> int:
    """Run a command that joins a cluster, found or started; returns the command's exit code."""
    try:
        order = read_order(arguments, os.environ, prog)
        check_command(order.command[0], os.environ)
        return _run(order, prog)
    except CommandError as error:
        _say(f"{prog}: {error}", "bold red")
        return error.code
    except NoKeeperError as error:
        _say("\n".join(part for part in (f"{prog}: {error.message}", error.advice) if part), "bold red")
    except (OSError, TypeError, ValueError) as error:
        _say(f"{prog}: {error}", "bold red")
    return FAILED


def _run(order: Order, prog: str) -> int:
    with Signals() as signals, Keeper(order.wish, signals) as keeper:
        try:
            found = keeper.found()
        except InterruptedStartError as error:
            return 128 + error.number
        _say(f"{prog}: {sentence(found)}")
        with Terminal() as terminal:
            child = Child(order.command, {**os.environ, **found.env}, order.grace_s)
            code = child.run(signals, terminal)
        if found.started and keeper.has_ended:
            _say(f"{prog}: the cluster at {found.address} ended before the command did", "bold red")
        return code


def sentence(found: Found) -> str:
    """Which cluster a command gets, and why, in a line."""
    if found.started:
        return f"started a cluster at {found.address}, which ends with the command ({found.why})"
    return f"joined the cluster at {found.address}, which stays ({found.why})"


def _say(text: str, style: str = "") -> None:
    """Write to the standard error; the command runs even if nobody reads that, or it is full or closed."""
    if sys.stderr is None or not _has_room():
        return
    console = Console(stderr=True, highlight=False)
    with console.capture() as told:
        console.print(Printable(Text(text, style=style)), soft_wrap=True)
    with suppress(OSError):
        sys.stderr.write(told.get())
        sys.stderr.flush()


def _has_room() -> bool:
    """Whether the standard error takes a line, as a terminal does not that is held by Ctrl-S."""
    try:
        return bool(select.select([], [sys.stderr.fileno()], [], _ROOM_S)[1])
    except io.UnsupportedOperation:  # It is no file.
        return True
