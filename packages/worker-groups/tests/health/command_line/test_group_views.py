"""What the commands that look at groups say of what they found."""

import argparse
import io

import pytest
from rich.console import Console

from raycrew.worker_groups._health.command_line import commands
from raycrew.worker_groups._health.roster import Found, UnknownGroupError

OPTIONS = argparse.Namespace(json=False, timeout=5.0, group=["late"], rank=[], sort="rank", interval=0.5)


@pytest.mark.hostile
def test_groups_of_another_version_are_said(monkeypatch):
    monkeypatch.setattr(commands, "look", lambda *_: Found([], 2))
    monkeypatch.setattr(commands, "take_stacks", lambda *_: Found([], 2))
    for run in (commands.run_groups, commands.run_stacks):
        outcome, screen = run(OPTIONS), Console(file=io.StringIO())
        screen.print(outcome.shown)
        assert (outcome.code, outcome.data) == (1, [])
        assert screen.file.getvalue().strip() == "2 worker groups of another version of raycrew"


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
