"""What other packages tell of who works on a cluster."""

import pytest
from distributions import add_distribution

from raycrew.cluster_core._command_line.guests import occupants
from raycrew.cluster_core._command_line.subcommands import brought

GUESTS = '''
import os, sys
from raycrew.cluster_core.commands import Outcome, run

def look(timeout_s):
    return [{"name": "policy", "states": {}, "workers": [], "took": timeout_s}]

def half(timeout_s):
    return [*look(timeout_s), {"name": "half", "states": {}, "workers": [{"rank": 0, "state": "idle"}]}]

def no_report(timeout_s):
    return ["policy"]

def fails(timeout_s):
    raise RuntimeError("not today")

def gadgets(arguments, prog):
    """Show gadgets."""
    size = lambda parser: parser.add_argument("--size")
    return run(arguments, prog, "Show.", size, lambda options: Outcome([options.size], "", 1))
'''


@pytest.fixture
def guests(tmp_path, monkeypatch):
    add_distribution(
        tmp_path,
        "guests",
        GUESTS,
        "[raycrew.occupants]\nb = guests:look\na = guests:fails\nc = guests:half\nd = guests:no_report\n"
        "[raycrew.cluster_commands]\ngadgets = guests:gadgets\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    brought.cache_clear()
    yield
    brought.cache_clear()


def test_each_package_is_asked_and_one_that_fails_is_named(guests):
    found, problems = occupants(3.0)
    assert [one["took"] for one in found if one["name"] == "policy"] == [3.0]
    assert all(one["name"] != "half" for one in found), "nothing is shown of a report that is none"
    lacks = "placement_bundle, placement_group, private_bytes"
    assert any(
        f"guests can't tell who works here: ValueError: its report has no {lacks}" in p for p in problems
    )
    assert any("guests can't tell who works here: AttributeError: 'str'" in one for one in problems)
    assert any("guests can't tell who works here: RuntimeError: not today" in one for one in problems)
