"""What the command line is asked for: the parser of each command, and one command run."""

import argparse
import math
import sys
from collections.abc import Sequence

from ray.exceptions import RayError

from raycrew.cluster_core.commands import run
from raycrew.worker_groups._health.command_line import commands
from raycrew.worker_groups._health.diagnosis import check_folder
from raycrew.worker_groups.errors import WorkerGroupError

_FAILURES = (RayError, WorkerGroupError)
_CODES = (
    "Exit codes: 0 fine, 1 some rank is dead, stopped, silent or unanswered, or a group is of another "
    "version of raycrew, 2 bad usage or no such cluster"
)


def groups(arguments: Sequence[str], prog: str = "raycrew groups") -> int:
    """Show worker groups: what each rank is up to, and what it uses."""
    return run(arguments, prog, groups.__doc__ or "", _add_look, commands.run_groups, _FAILURES)


def top(arguments: Sequence[str], prog: str = "raycrew top") -> int:
    """Keep showing worker groups, until Ctrl-C; once where the output is no terminal, or with --json."""
    return run(arguments, prog, top.__doc__ or "", _add_top, commands.run_top, _FAILURES)


def stacks(arguments: Sequence[str], prog: str = "raycrew stacks") -> int:
    """Show where all threads of all ranks are, whatever the ranks are at."""
    return run(arguments, prog, stacks.__doc__ or "", _add_stacks, commands.run_stacks, _FAILURES)


def diagnose(arguments: Sequence[str], prog: str = "raycrew diagnose") -> int:
    """Leave what all ranks are at in a folder for each worker group, as text and as JSON."""
    return run(arguments, prog, diagnose.__doc__ or "", _add_diagnose, commands.run_diagnose, _FAILURES)


def _add_common(parser: argparse.ArgumentParser, timeout_s: float) -> None:
    parser.add_argument("group", nargs="*", help="names of groups, or NAME@DRIVER as shown (default: all)")
    parser.add_argument(
        "--timeout", type=_seconds, default=timeout_s, metavar="SECONDS",
        help=f"for nodes to answer; ranks of those that do not are unanswered (default: {timeout_s:g})",
    )  # fmt: skip
    parser.epilog = f"{_CODES}, 130 Ctrl-C."


def _add_look(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, 5.0)
    parser.add_argument("--sort", choices=commands.ORDERS, default="rank", help="order of ranks")


def _add_top(parser: argparse.ArgumentParser) -> None:
    _add_look(parser)
    parser.epilog = f"{_CODES}. Ctrl-C ends it with the code of what was seen last."
    parser.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="SECONDS", help="between two looks (default: 2)"
    )


def _add_stacks(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, 15.0)
    parser.add_argument("--rank", type=int, action="append", default=[], help="a rank; may be repeated")


def _add_diagnose(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, 15.0)
    parser.add_argument(
        "--folder", type=_folder, metavar="DIRECTORY",
        help="where to make the folders (default: among temporary files)",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=_lines, default=0, metavar="LINES",
        help="of each rank, with secrets if it has printed any (default: none)",
    )  # fmt: skip


def _folder(text: str) -> str:
    try:
        check_folder("it", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _lines(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of lines above 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


_COMMANDS = {"groups": groups, "status": groups, "top": top, "stacks": stacks, "diagnose": diagnose}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser("raycrew", description="Look at worker groups that run.")
    parser.add_argument("command", choices=_COMMANDS)
    options = parser.parse_args(arguments[:1])
    return _COMMANDS[options.command](arguments[1:])
