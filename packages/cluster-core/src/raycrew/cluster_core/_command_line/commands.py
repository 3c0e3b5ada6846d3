"""What the command line does; each command returns what it found and an exit code."""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich import filesize
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raycrew.cluster_core._command_line.guests import Report, check_occupants, occupants
from raycrew.cluster_core._command_line.terminal import Outcome
from raycrew.cluster_core._connection import prepare_visit
from raycrew.cluster_core._planning import (
    BOOKKEEPING,
    Bundle,
    NodeState,
    Placement,
    PlacementPlan,
    PlacementRequest,
    plan_cluster,
)
from raycrew.cluster_core.errors import NoClusterError

if TYPE_CHECKING:
    from raycrew.cluster_core._ray import GroupState
    from raycrew.cluster_core.layout import NodeRow

OK, PROBLEM, USAGE, INTERRUPTED = 0, 1, 2, 130
LOOK_S = 5.0  # for what works on the cluster to tell of itself


def run_plan(options: argparse.Namespace) -> Outcome:
    """Which node takes which bundles."""
    request = PlacementRequest(
        tuple(options.request), options.bundle, strategy=options.strategy, segment_size=options.segment_size
    )
    if (options.nodes is None) == (options.address is None):
        raise ValueError("plan takes either --nodes or --address")
    if options.nodes is None and (options.node_cpus, options.domain_size) != (None, None):
        raise ValueError("--node-cpus and --domain-size are of --nodes, not of a cluster that runs")
    if options.address is None:
        holders: dict[str, list[str]] = {}
        nodes = _made_up(
            options.nodes, options.bundle, options.node_cpus, options.domain_size, request.domain_label
        )
    else:
        nodes, holders = _census(options.address)
    order = _ranks(() if options.order is None else options.order, nodes)
    plan = plan_cluster(nodes, replace(request, node_order=order or None), holders)
    answer = {
        "feasible": plan.feasible,
        "impossible": plan.impossible,
        "reasons": list(plan.reasons),
        "nodes": [[{"node": node, "bundles": n} for node, n in _runs(ids)] for ids in plan.node_ids],
        "order": sorted(order, key=order.__getitem__),
    }
    names = {node.node_id: _name(node) for node in nodes}
    return Outcome(answer, _plan_shown(plan, names), OK if plan.feasible else PROBLEM)


def _ranks(order: Sequence[str], nodes: Sequence[NodeState]) -> dict[str, float]:
    """The nodes that are named, by their ids or how those begin, with their ranks."""
    ranks: dict[str, float] = {}
    for rank, name in enumerate(order):
        exact = [node.node_id for node in nodes if node.node_id == name]
        found = exact or [node.node_id for node in nodes if node.node_id.startswith(name)]
        if len(found) != 1 or found[0] in ranks:
            problem = "names a node again" if len(found) == 1 else f"is how {len(found)} node ids begin"
            raise ValueError(f"--order: {name!r} {problem}")
        ranks[found[0]] = rank
    return ranks


def _name(node: NodeState) -> str:
    """A node as people know it; made-up ones have no other address than their id."""
    return node.node_id if node.address == node.node_id else f"{node.address} ({node.node_id[:8]})"


def _made_up(
    counts: Sequence[int],
    bundle: dict[str, float],
    cpus: float | None,
    domain_size: int | None,
    domain_label: str,
) -> list[NodeState]:
    device = next((name for name in bundle if name != "CPU"), "CPU")
    if device == "CPU" and cpus is not None:
        raise ValueError("--nodes counts CPUs where a bundle has nothing else, and --node-cpus does, too")
    nodes = []
    for index, count in enumerate(counts):
        total = {"CPU": cpus or 0.0, device: float(count)}
        labels = {domain_label: f"domain-{index // domain_size}"} if domain_size else {}
        nodes.append(NodeState(f"node-{index}", f"node-{index}", total, total, labels))
    return nodes


def _runs(ids: Sequence[str]) -> list[tuple[str, int]]:
    return [(node, len(list(members))) for node, members in groupby(ids)]


def _plan_shown(plan: PlacementPlan, names: Mapping[str, str]) -> RenderableType:
    if not plan.feasible:
        never = "It never fits:" if plan.impossible else "It does not fit now:"
        return Text.assemble((never, "bold red"), *(f"\n  {reason}" for reason in plan.reasons))
    count = sum(map(len, plan.node_ids))
    table = Table("logical node", "bundles on nodes", title=f"fits: {count} bundle{'s' * (count != 1)}")
    shown = list(enumerate(plan.node_ids))
    for index, ids in shown[:40]:
        table.add_row(str(index), Text(", ".join(f"{n} on {names[node]}" for node, n in _runs(ids)) or "-"))
    more = [f"… and {len(shown) - 40} more; --json shows all"] if len(shown) > 40 else []
    return Group(table, *more)


def _census(address: str) -> tuple[list[NodeState], dict[str, list[str]]]:
    from raycrew.cluster_core._connection import init_ray
    from raycrew.cluster_core._ray import holders_by_node, node_states

    with init_ray(address):
        nodes = node_states()
        return nodes, holders_by_node(nodes)


def run_status(options: argparse.Namespace) -> Outcome:
    """What there is, and who holds it."""
    from raycrew.cluster_core._connection import init_ray
    from raycrew.cluster_core._ray import holders_by_node, node_states

    with init_ray(options.address) as connection:
        nodes, address = node_states(), connection.address
        holders = holders_by_node(nodes)
        groups, problems = occupants(LOOK_S)
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
        "worker_groups": groups,
        "problems": problems,
    }
    shown = _status_shown(address, nodes, holders)
    return Outcome(answer, Group(shown, *_groups_shown(groups), *map(_plain, problems)))


def _shown(amounts: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in sorted(amounts.items()) if not BOOKKEEPING.search(name)}


def _status_shown(address: str, nodes: Sequence[NodeState], holders: dict[str, list[str]]) -> RenderableType:
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
    return table


def _groups_shown(groups: Sequence[Report]) -> list[RenderableType]:
    if not groups:
        return []
    table = Table("worker group", "ranks", "up to", "memory", title="worker groups")
    for group in groups:
        workers, states = group["workers"], group["states"]
        up_to = ", ".join(f"{count} {state}" for state, count in states.items())
        known = [worker["private_bytes"] for worker in workers if worker["private_bytes"] is not None]
        memory = filesize.decimal(sum(known)) if known else ""
        note = f" ({group['note']})" if group.get("note") else ""
        table.add_row(Text(group["name"]), str(sum(states.values())), Text(up_to + note), memory)
    return [table]


def _plain(text: str) -> Text:
    return Text(text, style="yellow")


class _Group:
    """A placement group, or a group of workers on such, as a drawing sees it."""

    def __init__(self, name: str, placements: Sequence[Placement]) -> None:
        self.name = name
        self.placements = placements


def _state(worker: Mapping[str, Any]) -> str:
    """What a worker is up to, and its memory, as a drawing has it."""
    memory = worker["private_bytes"]
    return worker["state"] if memory is None else f"{worker['state']} {filesize.decimal(memory)}"


def run_grid(options: argparse.Namespace) -> Outcome:
    """Placement groups on their nodes, and who works on them."""
    from raycrew.cluster_core import layout
    from raycrew.cluster_core._connection import init_ray
    from raycrew.cluster_core._ray import group_states, node_states

    with init_ray(options.address):
        nodes, states = node_states(), group_states()
        reports, problems = occupants(LOOK_S)
    bundles, groups, known = _placed(nodes, states)
    drawn = [*groups, *(group for report in reports for group in _occupying(report, known))]
    answer = [_row(row, len(groups)) for row in layout.rows(bundles, drawn)]
    if options.svg is not None:
        options.svg.write_text(layout.svg(bundles, drawn), encoding="utf-8")
    empty = len(nodes) - len({bundle.node_id for bundle in bundles})
    rest = Text(f"{empty} of {len(nodes)} nodes hold no placement group")
    return Outcome(answer, Group(layout.grid(bundles, drawn), rest, *map(_plain, problems)))


def _placed(
    nodes: Sequence[NodeState], states: "Sequence[GroupState]"
) -> tuple[list[Bundle], list[_Group], dict[tuple[str, int], int]]:
    """All bundles, the placement groups on them, and by Ray's own number of a bundle the one given here."""
    position = {node.node_id: index for index, node in enumerate(nodes)}
    places = sorted(
        (position[node_id], number, part)
        for number, state in enumerate(states)
        for part, node_id in enumerate(state.node_ids)
        if state.state != "REMOVED" and node_id in position
    )
    bundles: list[Bundle] = []
    held: dict[int, list[Placement]] = defaultdict(list)
    known: dict[tuple[str, int], int] = {}
    for index, (where, number, part) in enumerate(places):
        node, state = nodes[where], states[number]
        bundles.append(Bundle(index, where, node.node_id, node.address, state.bundles[part]))
        held[number].append(Placement(len(held[number]), index))
        known[state.group_id, part] = index
    return bundles, [_Group(states[n].name or "(no name)", seats) for n, seats in held.items()], known


def _occupying(report: Report, known: Mapping[tuple[str, int], int]) -> "list[_Group]":
    """A group of workers as it is drawn, and those that stand by as another one: they have no ranks."""
    standbys = [{**one, "rank": number} for number, one in enumerate(report.get("standbys", ()))]
    drawn = [_Group(report["name"], _seats(report["workers"], known))]
    return drawn + ([_Group(f"{report['name']} standby", _seats(standbys, known))] if standbys else [])


def _seats(workers: Sequence[Mapping[str, Any]], known: Mapping[tuple[str, int], int]) -> list[Placement]:
    """Where workers sit, with what they are up to."""
    seats = []
    for worker in workers:
        index = known.get((worker["placement_group"], worker["placement_bundle"]))
        if index is not None:  # else it is on no bundle, or on one that was made after the look
            seats.append(Placement(worker["rank"], index, state=_state(worker)))
    return seats


def _row(row: "NodeRow", n_groups: int) -> dict[str, Any]:
    """A node for programs; the first occupants are placement groups, the others work there."""
    cells = [
        {
            "title": cell.title,
            "held_by": [seat.name for seat in cell.seats if seat.occupant < n_groups],
            "workers": [
                {"group": seat.name, "rank": seat.rank, "state": seat.state}
                for seat in cell.seats
                if seat.occupant >= n_groups
            ],
        }
        for cell in row.cells
    ]
    return {"node": row.title, "bundles": cells}


def run_doctor(options: argparse.Namespace) -> Outcome:
    """The usual troubles."""
    if options.local and options.address != "auto":
        raise ValueError("doctor takes either --local or --address")
    address: str | None = None if options.local else options.address
    unclear: NoClusterError | None = None
    try:
        address = address and prepare_visit(address)  # before Ray is imported
    except NoClusterError as error:
        address, unclear = None, error
    from raycrew.cluster_core import doctor

    findings = doctor.examine(address, options.port_range, lambda: [check_occupants(*occupants(LOOK_S))])
    if unclear is not None:
        findings.append(doctor.no_connection(unclear))
    bad = any(finding.state == "bad" for finding in findings)
    answer = [finding.as_dict() for finding in findings]
    return Outcome(answer, doctor.table_of(findings), PROBLEM if bad else OK)
