"""The command line: `doctor`, `status`, `plan` and `grid`."""

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from raycrew.cluster_core._connection import prepare_visit
from raycrew.cluster_core._placement import STRATEGIES, PlacementPlan, PlacementRequest, plan_cluster
from raycrew.cluster_core._topology import BOOKKEEPING, Bundle, NodeState, Placement
from raycrew.cluster_core.errors import ClusterError

_GROUPS = re.compile(r"(?:(\d+)x)?(\d+)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status.

    0 is well, 1 is bad news (a check failed, a request does not fit), 2 is a command that can't work.
    """
    options = _parser().parse_args(arguments)
    try:
        if getattr(options, "address", None) and not getattr(options, "local", False):
            options.address = prepare_visit(options.address)
        answer, draw, status = options.run(options)
    except (ClusterError, ValueError, OSError) as error:
        Console(stderr=True).print(f"{type(error).__name__}: {error}", style="red", markup=False)
        return 2
    if options.json:
        _write(json.dumps(answer))
    else:
        draw(Console())
    return int(status)


def _write(line: str) -> None:
    try:
        sys.stdout.writelines([line, "\n"])  # In two: an unbuffered stream does not tell of the first alone.
        sys.stdout.flush()
    except BrokenPipeError:  # As `head` does when it has enough; rich ends in the same way.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


_Answer = tuple[Any, Callable[[Console], None], int]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m raycrew.cluster_core", description="Look at Ray clusters, and plan what goes where."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print JSON")
    connected = argparse.ArgumentParser(add_help=False)
    connected.add_argument(
        "--address",
        default="auto",
        help="host:port of the cluster (default: RAY_ADDRESS, else yours on this machine)",
    )

    doctor = commands.add_parser("doctor", parents=[shared, connected], help="find the usual troubles")
    doctor.add_argument("--local", action="store_true", help="check this machine alone, no cluster")
    doctor.add_argument(
        "--port-range", type=_pair, metavar="FIRST-LAST", help="ports that you mean to lease from"
    )
    doctor.set_defaults(run=_doctor)

    status = commands.add_parser("status", parents=[shared, connected], help="what there is and who holds it")
    status.set_defaults(run=_status)

    grid = commands.add_parser(
        "grid", parents=[shared, connected], help="draw placement groups on their nodes"
    )
    grid.set_defaults(run=_grid)

    plan = commands.add_parser(
        "plan", parents=[shared], help="which node takes which bundles; needs no cluster"
    )
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
    plan.add_argument("--node-cpus", type=float, default=0.0, help="CPUs of each node of --nodes")
    plan.add_argument("--strategy", choices=STRATEGIES, default="STRICT_PACK")
    plan.add_argument("--segment-size", type=int, help="logical nodes that share a domain")
    plan.add_argument("--domain-size", type=int, help="nodes of --nodes per domain")
    plan.set_defaults(run=_plan)
    return parser


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
    return int(first), int(last)


def _amounts(text: str) -> dict[str, float]:
    try:
        return {name.strip(): float(amount) for name, amount in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=AMOUNT,…") from None


def _plan(options: argparse.Namespace) -> _Answer:
    request = PlacementRequest(
        tuple(options.request), options.bundle, strategy=options.strategy, segment_size=options.segment_size
    )
    if (options.nodes is None) == (options.address is None):
        raise ValueError("plan takes either --nodes or --address")
    if options.address is None:
        holders: dict[str, list[str]] = {}
        nodes = _made_up(
            options.nodes, options.bundle, options.node_cpus, options.domain_size, request.domain_label
        )
    else:
        nodes, holders = _census(options.address)
    plan = plan_cluster(nodes, request, holders)
    answer = {
        "feasible": plan.feasible,
        "impossible": plan.impossible,
        "reasons": list(plan.reasons),
        "nodes": [[{"node": node, "bundles": n} for node, n in _runs(ids)] for ids in plan.node_ids],
    }
    names = {node.node_id: _name(node) for node in nodes}
    return answer, lambda console: _draw_plan(console, plan, names), 0 if plan.feasible else 1


def _name(node: NodeState) -> str:
    """A node as people know it; made-up ones have no other address than their id."""
    return node.node_id if node.address == node.node_id else f"{node.address} ({node.node_id[:8]})"


def _made_up(
    counts: Sequence[int], bundle: dict[str, float], cpus: float, domain_size: int | None, domain_label: str
) -> list[NodeState]:
    device = next((name for name in bundle if name != "CPU"), "CPU")
    nodes = []
    for index, count in enumerate(counts):
        total = {"CPU": cpus, device: float(count)}
        labels = {domain_label: f"domain-{index // domain_size}"} if domain_size else {}
        nodes.append(NodeState(f"node-{index}", f"node-{index}", total, total, labels))
    return nodes


def _runs(ids: Sequence[str]) -> list[tuple[str, int]]:
    return [(node, len(list(members))) for node, members in groupby(ids)]


def _draw_plan(console: Console, plan: PlacementPlan, names: Mapping[str, str]) -> None:
    if not plan.feasible:
        console.print("It never fits:" if plan.impossible else "It does not fit now:", style="bold red")
        for reason in plan.reasons:
            console.print(Padding(Text(reason), (0, 0, 0, 2)))
        return
    count = sum(map(len, plan.node_ids))
    table = Table("logical node", "bundles on nodes", title=f"fits: {count} bundle{'s' * (count != 1)}")
    shown = list(enumerate(plan.node_ids))
    for index, ids in shown[:40]:
        table.add_row(str(index), Text(", ".join(f"{n} on {names[node]}" for node, n in _runs(ids)) or "-"))
    console.print(table)
    if len(shown) > 40:
        console.print(f"… and {len(shown) - 40} more; --json shows all")


def _census(address: str) -> tuple[list[NodeState], dict[str, list[str]]]:
    from raycrew.cluster_core._connection import init_ray
    from raycrew.cluster_core._ray import holders_by_node, take_census

    with init_ray(address):
        nodes = take_census()
        return nodes, holders_by_node(nodes)


def _status(options: argparse.Namespace) -> _Answer:
    from raycrew.cluster_core._connection import init_ray
    from raycrew.cluster_core._ray import holders_by_node, take_census

    with init_ray(options.address) as connection:
        nodes, address = take_census(), connection.address
        holders = holders_by_node(nodes)
    answer = {
        "address": address,
        "nodes": [
            {
                "node_id": node.node_id,
                "address": node.address,
                "total": _shown(node.total),
                "free": _shown(node.free),
                "labels": dict(node.labels),
                "draining": node.draining,
                "holders": holders.get(node.node_id, []),
            }
            for node in nodes
        ],
    }
    return answer, lambda console: _draw_status(console, address, nodes, holders), 0


def _shown(amounts: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in sorted(amounts.items()) if not BOOKKEEPING.search(name)}


def _draw_status(
    console: Console, address: str, nodes: Sequence[NodeState], holders: dict[str, list[str]]
) -> None:
    table = Table("node", "address", "free of total", title=Text(f"cluster at {address}"))
    table.add_column("held by", overflow="fold")  # Long names differ in their ends.
    for node in nodes:
        amounts = [
            f"{node.free.get(name, 0):g}/{total:g} {name}" for name, total in _shown(node.total).items()
        ]
        table.add_row(
            node.node_id[:8],
            f"{node.address}\ndraining" if node.draining else node.address,
            Text("\n".join(amounts)),
            Text("\n".join(holders.get(node.node_id, []))),  # Brackets in names are no markup.
        )
    console.print(table)


class _Group:
    """A placement group as a drawing sees it: one worker per bundle."""

    def __init__(self, name: str, bundle_indices: Sequence[int]) -> None:
        self.name = name
        self.placements = [Placement(rank, index) for rank, index in enumerate(bundle_indices)]


def _grid(options: argparse.Namespace) -> _Answer:
    from raycrew.cluster_core import layout
    from raycrew.cluster_core._connection import init_ray
    from raycrew.cluster_core._ray import group_states, take_census

    with init_ray(options.address):
        nodes, states = take_census(), group_states()
    position = {node.node_id: index for index, node in enumerate(nodes)}
    places = sorted(
        (position[node_id], number, part)
        for number, state in enumerate(states)
        for part, node_id in enumerate(state.node_ids)
        if state.state != "REMOVED" and node_id in position
    )
    bundles: list[Bundle] = []
    held: dict[int, list[int]] = defaultdict(list)
    for index, (where, number, part) in enumerate(places):
        node, resources = nodes[where], states[number].bundles[part]
        bundles.append(Bundle(index, where, node.node_id, node.address, resources))
        held[number].append(index)
    groups = [_Group(states[number].name or "(no name)", indices) for number, indices in held.items()]
    answer = [
        {
            "node": row.title,
            "bundles": [{"title": c.title, "held_by": [s.name for s in c.seats]} for c in row.cells],
        }
        for row in layout.rows(bundles, groups)
    ]

    def draw(console: Console) -> None:
        layout.print_grid(bundles, groups, console=console)
        empty = len(nodes) - len({bundle.node_id for bundle in bundles})
        console.print(f"{empty} of {len(nodes)} nodes hold no placement group", highlight=False)

    return answer, draw, 0


def _doctor(options: argparse.Namespace) -> _Answer:
    from raycrew.cluster_core import doctor

    findings = doctor.examine(None if options.local else options.address, port_range=options.port_range)
    answer = [finding.as_dict() for finding in findings]
    return (
        answer,
        lambda console: doctor.print_findings(findings, console),
        int(any(f.state == "bad" for f in findings)),
    )
