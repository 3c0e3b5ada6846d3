"""Does it keep working, or say exactly why not? Faults, a plan of them, against a group that works.

`nox -s chaos -- [--seed S] [--faults N] [--only KIND …] [--minutes M] [--resume]` injects them one by one
into a small cluster of this machine. After each, every item that was sent is accounted for by its id,
everything works again before a deadline, and nothing is left behind. The exit code is 0 only when that holds
for all; 3 when some are still to do or found nobody to happen to, which `--resume` does; 130 after a Ctrl-C.
"""

import argparse
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from chaos.elsewhere import ROUNDS
from chaos.faults import KINDS, Fault, planned
from chaos.journal import Journal, Outcome, Result, alone
from chaos.leaks import RUN, counted_in, settled
from chaos.mounts import SkippedError
from chaos.playing import Round
from chaos.report import exit_code, table, troubles
from chaos.standing import Standing, standing
from chaos.watchdog import watched

#: As shells tell of a program that a Ctrl-C has ended.
INTERRUPTED = 130


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same faults (default 0)")
    parser.add_argument("--faults", type=int, default=50, help="how many (default 50)")
    names = [kind.name for kind in KINDS]
    parser.add_argument("--only", nargs="+", default=[], choices=names, metavar="KIND", help=f"of {names}")
    parser.add_argument("--minutes", type=float, help="begin no fault later; the rest is for --resume")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds that one wait may last")
    parser.add_argument("--journal", type=Path, default=Path("chaos.jsonl"), help="what was done (appended)")
    parser.add_argument("--resume", action="store_true", help="go on with what the journal has")
    return parser.parse_args(arguments)


def played(fault: Fault, stands: Standing) -> Outcome:
    """Inject one fault, and ask what came of it."""
    began, this = time.monotonic(), Round(fault, stands)
    result: Result = "recovered"
    try:
        ROUNDS[fault.kind](this)
        stands.answers()
    except SkippedError as error:
        return Outcome(fault.number, fault.kind, fault.moment, "skipped", notes=str(error))
    except Exception as error:  # noqa: BLE001 - the next fault gets another group
        result = "broken"
        this.notes.append(f"{type(error).__name__}: {error}")
    recovered = time.monotonic()
    account = this.book.account(stands.ran())
    if result == "broken":
        stands.renew()
    elif this.missed:
        result = "missed"
    if leaked := settled(stands.before, stands.look):
        stands.before = counted_in(stands.before, stands.look())
    troubled = (("lost", account.lost), ("twice", account.twice), ("wrong", account.wrong))
    return Outcome(
        *(fault.number, fault.kind, fault.moment, result, account.sent, account.answered, account.failed),
        wrong=tuple(f"{what}: {item}" for what, items in troubled for item in items),
        leaked=leaked,
        stall_s=round(recovered - this.began, 3),
        by_design=this.by_design,
        took_s=round(time.monotonic() - began, 3),
        notes="; ".join([*this.notes, *filter(None, [this.missed])]),
    )


def carry_out(faults: Sequence[Fault], journal: Journal, chosen: argparse.Namespace, screen: Console) -> None:
    """Inject what the journal does not have."""
    until = time.monotonic() + (float("inf") if chosen.minutes is None else chosen.minutes * 60)
    run = os.environ[RUN]
    with tempfile.TemporaryDirectory() as folder, standing(run, Path(folder), chosen.deadline) as stands:
        for fault in faults:
            if time.monotonic() >= until:
                break
            with watched(fault, journal, run, 4 * chosen.deadline, stands.folders):
                stands.renew_if_worn(fault)
                outcome = played(fault, stands)
            journal.add(outcome)
            good = outcome.result if not (outcome.wrong or outcome.leaked) else "NOT WELL"
            told = f"{fault.number:>4} {fault.kind}, {fault.moment}: {good}"
            screen.print(f"{told}, {outcome.stall_s:.1f} s of {outcome.took_s:.1f} s", highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the plan, or what is left of it."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200
    chosen, screen = options(arguments), Console(width=wide)
    try:
        with alone(chosen.journal):
            return run_plan(chosen, screen)
    except KeyboardInterrupt:
        said = f"stopped; --resume goes on with what {chosen.journal} has"
        screen.print(said, highlight=False, soft_wrap=True)
        return INTERRUPTED


def run_plan(chosen: argparse.Namespace, screen: Console) -> int:
    """Inject what is left of the plan, and report on all of it."""
    faults = planned(chosen.seed, chosen.faults, chosen.only)
    run = {"seed": chosen.seed, "faults": chosen.faults, "only": sorted(chosen.only)}
    journal = Journal(chosen.journal, run, resume=chosen.resume)
    done = {number for number, outcome in journal.outcomes.items() if outcome.result != "missed"}
    if left := [fault for fault in faults if fault.number not in done]:
        carry_out(left, journal, chosen, screen)
    outcomes = journal.outcomes.values()
    screen.print(table(outcomes))
    for line in troubles(outcomes):
        screen.print(line, highlight=False, markup=False)
    return exit_code(outcomes, len(faults))


def marked(arguments: Sequence[str]) -> None:
    """Start this program again with the variable that all of its processes inherit, itself included."""
    os.environ[RUN] = secrets.token_hex(16)
    os.execv(sys.executable, [sys.executable, "-m", "chaos.run", *arguments])


if __name__ == "__main__":
    if RUN not in os.environ:
        marked(sys.argv[1:])
    sys.exit(main())
