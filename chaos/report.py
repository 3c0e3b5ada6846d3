"""What a run came to: a table, and whether it is good."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.table import Column, Table

from chaos.journal import Outcome

FINE, BROKEN, UNFINISHED = 0, 1, 3


@dataclass(frozen=True)
class Row:
    """One kind of fault: how often it was injected, and what it did."""

    kind: str
    injected: int
    recovered: int
    lost: int
    leaked: int
    longest_stall_s: float
    by_design: int
    missed: int
    skipped: int


def rows(outcomes: Collection[Outcome]) -> list[Row]:
    """One row per kind, in the order of their names, and one for all."""
    kinds = sorted({outcome.kind for outcome in outcomes})
    groups = [(kind, [each for each in outcomes if each.kind == kind]) for kind in kinds]
    return [_row(kind, found) for kind, found in [*groups, ("all", list(outcomes))]]


def _row(kind: str, outcomes: Sequence[Outcome]) -> Row:
    injected = [outcome for outcome in outcomes if outcome.result not in ("missed", "skipped")]
    return Row(
        kind,
        len(injected),
        sum(outcome.result == "recovered" for outcome in injected),
        sum(len(outcome.wrong) for outcome in outcomes),
        sum(len(outcome.leaked) for outcome in outcomes),
        max((outcome.stall_s for outcome in injected), default=0.0),
        sum(outcome.by_design for outcome in injected),
        sum(outcome.result == "missed" for outcome in outcomes),
        sum(outcome.result == "skipped" for outcome in outcomes),
    )


def exit_code(outcomes: Collection[Outcome], planned: int) -> int:
    """0 if all that was planned was done and nothing was lost, leaked or left broken; 3 if some is to do.

    What happened to nobody is still to do; what can't be injected here is not.
    """
    total = rows(outcomes)[-1]
    if total.lost or total.leaked or total.recovered < total.injected:
        return BROKEN
    return FINE if len(outcomes) == planned and total.injected and not total.missed else UNFINISHED


def table(outcomes: Collection[Outcome]) -> Table:
    """The rows, drawn."""
    drawn = Table("fault", *(Column(name, justify="right") for name in _COLUMNS), caption=_BY_DESIGN)
    for row in rows(outcomes):
        cells = (row.injected, row.recovered, row.lost, row.leaked, f"{row.longest_stall_s:.1f} s")
        drawn.add_row(row.kind, *map(str, (*cells, row.by_design, row.missed, row.skipped)))
    return drawn


_COLUMNS = (
    *("times injected", "recovered", "lost", "leaked", "longest stall"),
    *("by design", "missed", "skipped"),
)
_BY_DESIGN = "by design: results that a killed driver owned and had not written down; Ray loses those"


def troubles(outcomes: Collection[Outcome]) -> list[str]:
    """A line for each fault that was not borne, and for each reason to skip one."""
    told = [
        f"{each.number}: {each.kind} in the midst of {each.moment}: {each.result}"
        + "".join(f"\n    {what}: {one}" for what, one in _what(each))
        for each in outcomes
        if each.result != "skipped" and (each.result != "recovered" or each.wrong or each.leaked)
    ]
    skipped = sorted({f"{each.kind}: skipped: {each.notes}" for each in outcomes if each.result == "skipped"})
    return told + skipped


def _what(outcome: Outcome) -> list[tuple[str, str]]:
    notes = [("note", outcome.notes)] if outcome.notes else []
    return [*(("lost", one) for one in outcome.wrong), *(("left", one) for one in outcome.leaked), *notes]
