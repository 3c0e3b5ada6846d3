"""What the command line is asked for: its parser, and one command run."""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import raycrew.cluster_core
from raycrew.cluster_core._command_line import commands, subcommands, terminal
from raycrew.cluster_core._connection import connection_advice, prepare_visit
from raycrew.cluster_core._planning import STRATEGIES
from raycrew.cluster_core._ports import check_port_range
from raycrew.cluster_core.errors import ClusterError

_GROUPS = re.compile(r"(?:(\d+)x)?(\d+)")
_CODES = (
    "Exit codes: 0 fine, 1 a problem was found or a request does not fit, 2 bad usage or no such cluster, "
    "130 Ctrl-C"
)


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The command line; what other packages bring is only listed."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print what was found as JSON")
    top = terminal.parser_class(arguments)(
        "raycrew",
        description="Look at Ray clusters and at what runs on them, and plan what goes where.",
        epilog=f"{_CODES}; of run the command's. With --json errors are JSON, too, on standard output.",
    )
    top.add_argument("--version", action=terminal.ShowVersion, read=lambda: raycrew.cluster_core.__version__)
    parsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    connected = argparse.ArgumentParser(add_help=False)
    terminal.add_address(connected)

    def command(name: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        said = f"{text[0].upper()}{text[1:]}."
        parents = (common, *parents)
        return parsers.add_parser(name, help=text, description=said, epilog=f"{_CODES}.", parents=parents)

    doctor = command("doctor", "find the usual troubles", connected)
    doctor.add_argument("--local", action="store_true", help="check this machine alone, no cluster")
    doctor.add_argument(
        "--port-range", type=_pair, metavar="FIRST-LAST", help="ports that you mean to lease from"
    )
    doctor.set_defaults(run=commands.run_doctor)

    status = command("status", "show what there is, who holds it, and worker groups", connected)
    status.set_defaults(run=commands.run_status)

    grid = command("grid", "draw placement groups on their nodes, and who works there", connected)
    grid.add_argument("--svg", type=Path, metavar="FILE", help="draw it into a file, as an SVG image")
    grid.set_defaults(run=commands.run_grid)

    plan = command("plan", "say which node takes which bundles; needs no cluster")
    plan.add_argument(
        "--nodes", type=_counts, metavar="NxG,…", help="nodes there are: 100x8,4x4 (count x devices)"
    )
    plan.add_argument("--address", help="plan for what is free in this running cluster instead")
    plan.add_argument(
        "--request",
        type=_counts,
        required=True,
        metavar="NxB,…",
        help="logical nodes wanted: 16x8 (count x bundles)",
    )
    plan.add_argument(
        "--bundle", type=_amounts, default={"GPU": 1.0}, metavar="GPU=1,CPU=4", help="one bundle's needs"
    )
    plan.add_argument("--node-cpus", type=_amount, help="CPUs of each node of --nodes (default: none)")
    plan.add_argument("--strategy", choices=STRATEGIES, default="STRICT_PACK")
    plan.add_argument("--segment-size", type=int, help="logical nodes that share a domain")
    plan.add_argument("--domain-size", type=_positive, help="nodes of --nodes per domain")
    plan.add_argument(
        "--order",
        type=lambda text: [part.strip() for part in text.split(",")],
        metavar="ID,…",
        help="take nodes in this order, by their ids or how those begin; the others come last",
    )
    plan.set_defaults(run=commands.run_plan)
    parsers.add_parser("run", help="run a command that joins a cluster, found or started", add_help=False)
    is_list = not arguments or arguments[0] in ("-h", "--help")
    for name in subcommands.brought():
        parsers.add_parser(name, help=subcommands.summary(name) if is_list else "", add_help=False)
    return top


def _counts(text: str) -> list[int]:
    counts: list[int] = []
    for part in text.split(","):
        match = _GROUPS.fullmatch(part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"{part!r} is neither 8 nor 100x8")
        counts += [int(match[2])] * int(match[1] or 1)
    return counts


def _pair(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST-LAST")
    try:
        return check_port_range((int(first), int(last)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _amounts(text: str) -> dict[str, float]:
    amounts: dict[str, float] = {}
    for part in text.split(","):
        name, equals, amount = (word.strip() for word in part.partition("="))
        if not name or not equals:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=AMOUNT,…")
        if name in amounts:
            raise argparse.ArgumentTypeError(f"{text!r} names {name} twice")
        amounts[name] = _amount(amount)
    return amounts


def _amount(text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    if not 0 <= amount < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount")
    return amount


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    as_json = "--json" in arguments
    try:
        if arguments and arguments[0] == "run":
            from raycrew.cluster_core._command_line.running import run

            return run(arguments[1:])
        if arguments and arguments[0] in subcommands.brought():
            return _run_brought(arguments[0], arguments[1:])
        args = parser(arguments).parse_args(arguments)
        if getattr(args, "address", None) and args.command != "doctor":  # which tells what it finds of that
            args.address = prepare_visit(args.address)
        outcome: terminal.Outcome = args.run(args)
    except KeyboardInterrupt:
        terminal.complain("", "interrupted", as_json=as_json)
        return commands.INTERRUPTED
    except (ClusterError, ValueError, OSError) as error:
        advice = connection_advice(error)
        terminal.complain(type(error).__name__, str(error), advice, as_json=as_json)
        return commands.USAGE
    terminal.show(outcome.data, outcome.shown, as_json=args.json)
    return outcome.code


def _run_brought(name: str, arguments: Sequence[str]) -> int:
    """Run a subcommand of another package, the cluster that it looks at being found before it is loaded."""
    if subcommands.looks_at_a_cluster(name) and not {"-h", "--help"}.intersection(arguments):
        known = terminal.parser_class(arguments)(f"raycrew {name}", add_help=False, allow_abbrev=False)
        terminal.add_address(known)
        options, rest = known.parse_known_args(arguments)
        arguments = ["--address", prepare_visit(options.address), *rest]
    return subcommands.load(name)(arguments, f"raycrew {name}")
