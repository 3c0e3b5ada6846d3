"""What people see of a start-up, whatever a group is called."""

import io

import pytest
from rich.console import Console
from rich.errors import LiveError
from rich.progress import Progress
from workers import Worker

from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups._fan_out.progress import advancing
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


@pytest.mark.hostile
def test_names_of_functions_are_shown_as_they_are():
    seen = console()
    with Progress(console=seen) as display, advancing(display, "[/red]f", 2) as advance:
        advance(False)
    assert "[/red]f" in seen.file.getvalue()
    assert "(1 failed)" in seen.file.getvalue()


@pytest.mark.hostile
def test_a_start_goes_on_where_another_display_has_the_screen(monkeypatch):
    def refuse(self):
        raise LiveError("Only one live display may be active at once")

    monkeypatch.setattr(Progress, "start", refuse)
    with startup_progress("policy", 1, True) as progress:
        progress.step("processes")
        progress.advance()
