"""How a command line of raycrew reads arguments and answers: for people, or for programs with `--json`."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

WIDE = 200  # of tables in files and pipes, unless COLUMNS says otherwise

# All but tabs and ends of lines; what turns the direction of a line; halves of characters.
_TURNS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160), *_TURNS, *range(0xD800, 0xE000)))


@dataclass(frozen=True, slots=True)
class Printable:
    """What is shown, less the control characters in it: names and texts of others don't steer a terminal.

    Attributes:
        shown: What it is.
    """

    shown: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        """As rich draws it."""
        for segment in console.render(self.shown, options):
            yield segment if segment.control else segment._replace(text=segment.text.translate(_CONTROLS))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command found.

    Attributes:
        data: For programs (`--json`).
        shown: For people.
        code: Exit code: 0 fine, 1 a problem.
    """

    data: Any
    shown: RenderableType
    code: int = 0


def parser_class(arguments: Sequence[str]) -> type[argparse.ArgumentParser]:
    """The class of parsers for these arguments: with `--json`, what is wrong with them is told as JSON."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            if "--json" not in arguments:
                super().error(message)
            write(json.dumps(problem("UsageError", f"{self.prog}: {message}")))
            sys.exit(2)

    return Parser


def add_address(parser: argparse.ArgumentParser) -> None:
    """Let a command be told which cluster is meant."""
    parser.add_argument(
        "--address",
        default="auto",
        help="host:port of the cluster (default: RAY_ADDRESS, else yours on this machine)",
    )


class ShowVersion(argparse.Action):
    """An option that writes a version and ends; only then it is read, as what is not installed has none.

    Args:
        read: Tells the version.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, read: Callable[[], str]) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help="show the version")
        self._read = read

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Write it, and end."""
        try:
            write(self._read())
        except PackageNotFoundError as error:
            parser.error(str(error))
        sys.exit(0)


def problem(kind: str, message: str, advice: str = "") -> dict[str, Any]:
    """An error as JSON has it."""
    return {"error": {"type": kind, "message": message, **({"advice": advice} if advice else {})}}


def complain(kind: str, message: str, advice: str = "", *, as_json: bool) -> None:
    """Say what went wrong, and what to do about it."""
    if as_json:
        write(json.dumps(problem(kind, message, advice)))
        return
    text = "\n".join(part for part in (f"{kind}: {message}" if kind else message, advice) if part)
    Console(stderr=True).print(Printable(Text(text, style="bold red")), soft_wrap=True)


def show(data: Any, shown: RenderableType, *, as_json: bool) -> None:
    """Say what was found; where there is no standard output, the exit code alone says it."""
    if as_json:
        write(json.dumps(data))
        return
    is_seen = "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty())
    whole = not is_seen and isinstance(shown, Text)  # Sentences; tables have a width.
    with _writing():
        Console(width=None if is_seen else WIDE).print(Printable(shown), soft_wrap=whole)


def write(text: str) -> None:
    """Write a line, if there is a standard output."""
    if sys.stdout is None:
        return
    with _writing():
        sys.stdout.writelines([text, "\n"])  # In two: an unbuffered stream does not tell of the first alone.
        sys.stdout.flush()


@contextmanager
def _writing() -> Iterator[None]:
    """A reader that has enough ends this process quietly, and a full disk with a word of it."""
    try:
        yield
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's end tells of it again
        if not isinstance(error, BrokenPipeError):  # As `head` does when it has enough; rich ends so, too.
            complain(type(error).__name__, f"what was found could not be written: {error}", as_json=False)
        sys.exit(1)
