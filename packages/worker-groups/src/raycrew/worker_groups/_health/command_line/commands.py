"""What the command line does; each command returns what it found and an exit code."""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ray.exceptions import GetTimeoutError
from rich import filesize
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raycrew.cluster_core.commands import Outcome, Printable
from raycrew.worker_groups._health.diagnosis import Diagnosis, diagnose_groups
from raycrew.worker_groups._health.roster import (
    Found,
    GroupSight,
    RankSight,
    UnknownGroupError,
    look,
    take_stacks,
)

_WRONG = {"dead", "stopped", "silent", "unanswered"}
_STYLES = {"ready": "green", "busy": "cyan", "alive": "", "unanswered": "yellow"}
_BY: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "rank": lambda rank: rank["rank"],
    "cpu": lambda rank: -(rank["cpu"] or 0.0),
    "memory": lambda rank: -(rank["private_bytes"] or 0),
}
ORDERS = tuple(_BY)


def report(timeout_s: float) -> list[dict[str, Any]]:
    """All groups of the cluster, for commands of other packages."""
    return [group.as_dict() for group in look(timeout_s)]


def run_groups(options: argparse.Namespace) -> Outcome:
    """All groups, with what each rank is up to and uses."""
    return _found(look(options.timeout, options.group), options.sort)


def _found(groups: Found[GroupSight], order: str) -> Outcome:
    is_wrong = any(rank.state in _WRONG for group in groups for rank in group.ranks)
    shown = Group(*(_table(group, order) for group in groups), *_remarks(groups))
    return Outcome([group.as_dict() for group in groups], shown, int(is_wrong or groups.n_unread > 0))


def _remarks(found: Found[Any]) -> list[Text]:
    """What is to be said besides what was found."""
    if found.n_unread:
        groups = "worker group" if found.n_unread == 1 else "worker groups"
        return [Text(f"{found.n_unread} {groups} of another version of raycrew", style="yellow")]
    return [] if found else [Text("no worker groups")]


def _table(group: GroupSight, order: str) -> Table:
    states = ", ".join(f"{count} {state}" for state, count in group.counts.items())
    count = f"{group.n_ranks} rank{'' if group.n_ranks == 1 else 's'}"
    title = f"{group.record.name}: {count} ({states}), driver {group.record.driver}"
    title += f", {group.note}" if group.note else ""
    generation = group.record.generation
    table = Table(title=Text(f"{title}, generation {generation}" if generation else title))
    for column in ("rank", "state", "in", "for", "cores", "memory", "devices'", "pid", "node", "on"):
        table.add_column(column, justify="left" if column in ("state", "in", "node", "on") else "right")
    for rank in sorted(group.ranks, key=lambda one: (_BY[order](one.as_dict()), one.worker.rank)):
        table.add_row(*_cells(rank))
    for standby in group.standbys:
        table.add_row(Text("standby"), *_cells(standby)[1:])
    return table


def _cells(rank: RankSight) -> list[Text]:
    told, worker = rank.as_dict(), rank.worker
    state = Text(rank.state, style=_STYLES.get(rank.state, "bold red"))
    if rank.note:
        state.append(f" ({rank.note})", style="dim")
    running_s, cpu = told["running_s"], told["cpu"]
    cells = [
        told["method"] or "",
        "" if running_s is None else f"{running_s:.0f} s",
        "" if cpu is None else f"{cpu:.1f}",
        _size(told["private_bytes"]),
        _size(told["device_bytes"]),
        str(worker.pid),
        f"{worker.node_address} ({worker.node_id[:8]})",
        f"#{worker.bundle_index} {worker.device}",
    ]
    return [Text(str(worker.rank)), state, *map(Text, cells)]


def _size(n_bytes: int | None) -> str:
    return "" if n_bytes is None else filesize.decimal(n_bytes)


def run_top(
    options: argparse.Namespace,
    console: Console | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> Outcome:
    """The same again and again on a terminal, until Ctrl-C; once where there is none."""
    screen = console or Console()
    if options.json or not screen.is_terminal:
        return run_groups(options)
    outcome = Outcome([], Text("no look was taken"))
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        try:
            while True:
                try:
                    outcome = run_groups(options)
                    shown = outcome.shown
                except UnknownGroupError as error:  # it may come (again)
                    outcome = Outcome([], shown := Text(str(error)))
                except GetTimeoutError as error:  # it may answer again
                    shown = Group(outcome.shown, Text(str(error), style="bold red"))
                live.update(Printable(shown), refresh=True)
                pause(options.interval)
        except KeyboardInterrupt:
            pass  # how it is ended
    return outcome


def run_stacks(options: argparse.Namespace) -> Outcome:
    """The stacks of all threads of all ranks, and of those that stand by."""
    found = take_stacks(options.timeout, options.group, options.rank)
    shown = _remarks(found)
    for one in found:
        worker = one.worker
        where = f"pid {worker.pid} on {worker.node_address} ({worker.node_id[:8]})"
        who = "standby" if worker.rank < 0 else f"rank {worker.rank}"
        head = f"{one.record.name} {who} ({where}), driver {one.record.driver}"
        if one.note:
            shown.append(Text(f"{head}: {one.note}\n", style="yellow"))
        else:
            shown.append(Text.assemble((f"{head}, by {one.told_by}\n", "bold"), one.text, "\n"))
    is_wrong = found.n_unread > 0 or any(one.note for one in found if one.worker.rank >= 0)
    return Outcome([one.as_dict() for one in found], Text("\n").join(shown), int(is_wrong))


def run_diagnose(options: argparse.Namespace) -> Outcome:
    """What all ranks are at, left in a folder for each group."""
    found = diagnose_groups(options.timeout, options.group, options.folder, options.output)
    shown = Text("\n").join([*map(_told_of, found), *_remarks(found)])
    is_wrong = found.n_unread > 0 or any(rank.state in _WRONG for one in found for rank in one.ranks)
    return Outcome([one.as_dict() for one in found], shown, int(is_wrong))


def _told_of(diagnosis: Diagnosis) -> Text:
    states = Counter(rank.state for rank in diagnosis.ranks)
    counted = ", ".join(f"{count} {state}" for state, count in states.items())
    ranks = "1 rank" if len(diagnosis.ranks) == 1 else f"{len(diagnosis.ranks)} ranks"
    about = f"{diagnosis.group_name}: {ranks} ({counted})"
    return Text(f"{about}, what they are at lies in {diagnosis.folder}")
