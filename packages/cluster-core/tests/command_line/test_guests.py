"""What other packages tell of who works on a cluster."""

import pytest
from distributions import add_distribution

from raycrew.cluster_core._command_line.guests import check_occupants, occupants
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


@pytest.mark.parametrize(
    ("states", "note", "problems", "state", "said"),
    [
        ({"ready": 3, "busy": 1}, "", [], "good", "1 with 4 ranks, none starting or amiss"),
        (
            {"starting": 4},
            "starting for 9 s: processes",
            [],
            "doubtful",
            "policy: starting for 9 s: processes",
        ),
        ({"ready": 1, "dead": 2, "silent": 1}, "", [], "doubtful", "policy: 2 dead, 1 silent"),
        ({"ready": 1}, "", ["they can't be told"], "doubtful", "they can't be told"),
    ],
)
def test_the_doctor_hears_of_groups_that_do_not_work(states, note, problems, state, said):
    finding = check_occupants([{"name": "policy", "states": states, "workers": [], "note": note}], problems)
    assert (finding.state, finding.detail) == (state, said)
    assert ("raycrew stacks" in finding.advice) == said.startswith("policy")


def test_without_groups_the_doctor_has_nothing_to_look_at():
    assert check_occupants([]).state == "skipped"


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
