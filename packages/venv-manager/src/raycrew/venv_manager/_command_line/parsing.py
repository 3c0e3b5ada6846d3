"""What the command line is asked for: its parser, and one command run."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from raycrew.venv_manager._command_line import commands
from raycrew.venv_manager._store import Store
from raycrew.venv_manager._waiting import end_all
from raycrew.venv_manager.errors import SpecError, VenvError

WIDE = 200  # of tables in files and pipes, unless COLUMNS says otherwise


def parser(prog: str = "raycrew-env", *, as_json: bool = False) -> argparse.ArgumentParser:
    """The command line; what is wrong with it is told as JSON where that is asked for."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            if as_json:
                _complain("UsageError", f"{self.prog}: {message}", as_json=True)
                sys.exit(commands.USAGE)
            super().error(message)

    common = Parser(add_help=False)
    common.add_argument("--store", type=Path, help="folder of environments (default: RAYCREW_VENV_DIR)")
    common.add_argument("--json", action="store_true", help="print what was found as JSON")
    top = Parser(
        prog,
        description="Build virtual environments for workers, and look after them.",
        epilog="Exit codes: 0 fine, 1 a problem was found or a build failed, 2 bad usage, 130 Ctrl-C. "
        "With --json errors are JSON, too, on the standard output.",
    )
    top.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version")
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return subparsers.add_parser(name, help=text, description=text, parents=[common])

    ensure = command("ensure", "Build an environment where it is not there, and print its interpreter.")
    ensure.add_argument(
        "spec", nargs="*", help="'uv run …', a project's folder, a requirements file, a script, a lock"
    )
    ensure.add_argument(
        "--with", dest="packages", action="append", default=[], metavar="REQUIREMENT",
        help="a requirement as pip takes it, besides or in place of a spec; may be repeated",
    )  # fmt: skip
    ensure.add_argument("--name", help="a readable name for it")
    ensure.add_argument(
        "--upgrade", action="store_true", help="choose versions anew, build if others came out"
    )
    ensure.add_argument("--force", action="store_true", help="choose versions and build anew")
    command("list", "Show all environments.")
    verify = command("verify", "Show what drifted since environments were built.")
    verify.add_argument("name", nargs="*", help="keys or names (default: all)")
    verify.add_argument("--contents", action="store_true", help="read every file and compare checksums")
    verify.add_argument("--no-imports", action="store_true", help="do not start the interpreters")
    gc = command(
        "gc", "Remove what interrupted builds left, and environments by age or size; never one in use."
    )
    gc.add_argument(
        "--older-than", type=float, metavar="DAYS", help="those that nobody asked for in so many days"
    )
    gc.add_argument(
        "--max-size", metavar="SIZE", help="the longest unused, until the rest is no larger (20G, 500M)"
    )
    gc.add_argument("--keep", action="append", default=[], metavar="NAME", help="a key or name that stays")
    gc.add_argument("--dry-run", action="store_true", help="only say what would go")
    gc.add_argument("--ignore-hidden", action="store_true", help="processes that you may not look into count "
                    "as not using an environment, instead of using it")  # fmt: skip
    prefetch = command("prefetch", "Build all registered environments ahead.")
    prefetch.add_argument("name", nargs="*", help="only these classes")
    prefetch.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE",
                          help="a module that registers environments when imported")  # fmt: skip
    prefetch.add_argument("--max-builds", type=int, default=2, help="how many at the same time (default: 2)")
    explain = command("explain", "Say what tells two specs, or two environments, apart.")
    explain.add_argument("one")
    explain.add_argument("other")
    command("doctor", "Say whether environments can be built here, and with what.")
    return top


class _ShowVersion(argparse.Action):
    """Writes the version and ends; only then it is read, as what is not installed has none."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        try:
            _write(version("raycrew-venv-manager"))
        except PackageNotFoundError as error:
            parser.error(str(error))
        sys.exit(0)


def main(arguments: Sequence[str] | None = None, prog: str = "raycrew-env") -> int:
    """Build virtual environments for workers, and look after them."""
    arguments = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in arguments
    args = parser(prog, as_json=as_json).parse_args(arguments)
    try:
        store = Store(args.store)
        if store.root.exists() and not store.root.is_dir() and args.command != "doctor":
            raise SpecError(f"the store {store.root} is no folder")
        with _progress_in_lines():
            outcome = _run(args, store)
    except KeyboardInterrupt:
        end_all()
        said = "interrupted: what was being built is gone, nothing half-built is left"
        _complain("KeyboardInterrupt", said, as_json=as_json)
        return commands.INTERRUPTED
    except VenvError as error:
        _complain(type(error).__name__, str(error), as_json=as_json)
        return commands.USAGE if isinstance(error, SpecError) else commands.PROBLEM
    if args.json:
        _write(json.dumps(outcome.data))
    else:
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE
        Console(width=width).print(outcome.shown, soft_wrap=True)
    return outcome.code


def _write(text: str) -> None:
    try:
        sys.stdout.writelines([text, "\n"])  # in two: an unbuffered stream does not tell of the first alone
        sys.stdout.flush()
    except BrokenPipeError:  # as `head` does when it has enough; rich ends in the same way
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


@contextmanager
def _progress_in_lines() -> Iterator[None]:
    """Where the standard error is no terminal, write there what is logged of a build's progress."""
    if sys.stderr.isatty():
        yield
        return
    logger, handler = logging.getLogger("raycrew.venv_manager"), logging.StreamHandler(sys.stderr)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _complain(kind: str, text: str, *, as_json: bool) -> None:
    if as_json:
        _write(json.dumps({"error": {"type": kind, "message": text}}))
        return
    Console(stderr=True).print(text, style="bold red", markup=False, highlight=False, soft_wrap=True)


def _run(args: argparse.Namespace, store: Store) -> commands.Outcome:
    match args.command:
        case "ensure":
            return commands.run_ensure(
                store, args.spec, args.name, packages=args.packages, force=args.force, upgrade=args.upgrade
            )
        case "list":
            return commands.run_list(store)
        case "verify":
            return commands.run_verify(store, args.name, contents=args.contents, imports=not args.no_imports)
        case "gc":
            return commands.run_gc(
                store, args.older_than, args.max_size, args.keep,
                dry_run=args.dry_run, ignore_hidden=args.ignore_hidden,
            )  # fmt: skip
        case "prefetch":
            return commands.run_prefetch(store, args.name, args.modules, args.max_builds)
        case "explain":
            return commands.run_explain(store, args.one, args.other)
        case _:
            return commands.run_doctor(store)
