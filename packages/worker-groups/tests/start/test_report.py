"""What people see of a start-up, whatever a group is called."""

import io

import pytest
from rich.console import Console
from workers import Worker

from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups._start.report import startup_progress
from raycrew.worker_groups.testing import InProcessGroup


def console():
    return Console(file=io.StringIO(), force_terminal=True, width=200)


@pytest.mark.hostile
def test_names_with_markup_are_shown_as_they_are(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with startup_progress("[/red]", 1, True) as progress:
        progress.step("processes")
        progress.advance()
    assert "[/red]: processes" in capsys.readouterr().err
    with InProcessGroup(FakeCluster([1]), Worker, name_prefix="[/red]") as group:
        seen = console()
        group.print_worker_layout(seen)
        group.print_startup(seen)
        seen.print(group.startup)
    assert seen.file.getvalue().count("[/red]") == 3
