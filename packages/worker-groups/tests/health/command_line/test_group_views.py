"""What the commands that look at groups say of what they found."""

import argparse
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from test_group_records import RECORD, WORKERS

from raycrew.worker_groups._health.command_line import commands
from raycrew.worker_groups._health.diagnosis import Diagnosis, RankDiagnosis
from raycrew.worker_groups._health.roster import Found, UnknownGroupError
from raycrew.worker_groups._health.roster.sights import Stacks, group_sight

OPTIONS = argparse.Namespace(
    json=False, timeout=5.0, group=["late"], rank=[], sort="rank", interval=0.5, folder=None, output=0
)


@pytest.mark.hostile
@pytest.mark.parametrize(("count", "said"), [(1, "1 worker group"), (2, "2 worker groups")])
def test_groups_of_another_version_are_said(monkeypatch, count, said):
    monkeypatch.setattr(commands, "look", lambda *_: Found([], count))
    monkeypatch.setattr(commands, "take_stacks", lambda *_: Found([], count))
    monkeypatch.setattr(commands, "diagnose_groups", lambda *_: Found([], count))
    for run in (commands.run_groups, commands.run_stacks, commands.run_diagnose):
        outcome, screen = run(OPTIONS), Console(file=io.StringIO())
        screen.print(outcome.shown)
        assert (outcome.code, outcome.data) == (1, [])
        assert screen.file.getvalue().strip() == f"{said} of another version of raycrew"


def test_who_stands_by_has_a_row_and_is_no_rank(monkeypatch):
    record = replace(RECORD, standbys=(replace(WORKERS[1], rank=-1, pid=4711),))
    sight = group_sight(record, {(RECORD.namespace, WORKERS[1].actor)}, {}, {}, 0.0)
    monkeypatch.setattr(commands, "look", lambda *_: Found([sight], 0))
    screen = Console(file=io.StringIO(), width=200)
    screen.print(commands.run_groups(OPTIONS).shown)
    shown = screen.file.getvalue()
    assert "policy: 2 ranks (1 dead, 1 unanswered)" in shown
    (row,) = [line for line in shown.splitlines() if "standby" in line]
    assert "4711" in row and "-1" not in row


def test_stacks_of_who_stands_by_are_named_so_and_are_no_ranks(monkeypatch):
    found = [
        Stacks(RECORD, WORKERS[0], "in train", "py-spy"),
        Stacks(RECORD, replace(WORKERS[1], rank=-1), note="it is dead"),
    ]
    monkeypatch.setattr(commands, "take_stacks", lambda *_: Found(found, 0))
    outcome, screen = commands.run_stacks(OPTIONS), Console(file=io.StringIO(), width=200)
    screen.print(outcome.shown)
    shown = screen.file.getvalue()
    assert "policy rank 0 (" in shown and "policy standby (" in shown and "-1" not in shown
    assert (outcome.code, [one["rank"] for one in outcome.data]) == (0, [0, -1])


@pytest.mark.hostile
def test_top_waits_for_a_group_that_is_not_there_yet(monkeypatch):
    looks = []

    def look(*_):
        looks.append(None)
        if len(looks) == 1:
            raise UnknownGroupError("there is no worker group 'late'")
        return Found([], 0)

    def pause(_):
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(commands, "look", look)
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=10)
    assert commands.run_top(OPTIONS, console, pause).code == 0
    assert "no worker group 'late'" in console.file.getvalue() and len(looks) == 2


@pytest.mark.parametrize(("states", "code"), [(["busy", "ready"], 0), (["busy", "dead"], 1), ([], 0)])
def test_where_a_diagnosis_lies_is_said(monkeypatch, states, code):
    ranks = tuple(RankDiagnosis(i, 7, "node", "10.0.0.1", i, "cpu", state) for i, state in enumerate(states))
    made = Diagnosis("po[l]icy", "mine.Policy", 0, "asked for", 0.0, ranks, Path("/tmp/here"))
    monkeypatch.setattr(commands, "diagnose_groups", lambda *_: Found([made], 0))
    outcome, screen = commands.run_diagnose(OPTIONS), Console(file=io.StringIO(), width=200)
    screen.print(outcome.shown)
    assert (outcome.code, outcome.data) == (code, [made.as_dict()])
    counted = ", ".join(f"1 {state}" for state in states)
    expected = f"po[l]icy: {len(states)} ranks ({counted}), what they are at lies in /tmp/here"
    assert screen.file.getvalue().strip() == expected
