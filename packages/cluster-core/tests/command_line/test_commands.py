"""The command line, as a person or a script uses it."""

import json
import os
import re
import subprocess
import sys

import pytest
import ray

from raycrew.cluster_core.__main__ import main
from raycrew.cluster_core._command_line import commands


def said(capsys, *arguments):
    status = main(arguments)
    return status, capsys.readouterr().out


@pytest.mark.smoke
def test_planning_ten_thousand_nodes_needs_no_ray():
    code = """
import sys
from raycrew.cluster_core.__main__ import main
status = main(["plan", "--nodes", "10000x8", "--request", "4096x8", "--json"])
assert "ray" not in sys.modules
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["feasible"] and len(answer["nodes"]) == 4096
    assert all(sum(part["bundles"] for part in node) == 8 for node in answer["nodes"])
    assert len({part["node"] for node in answer["nodes"] for part in node}) == 4096


@pytest.mark.smoke
def test_the_module_runs():
    command = [sys.executable, "-m", "raycrew.cluster_core", "plan", "--nodes", "2x8", "--request", "2x8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "fits: 16 bundles" in done.stdout


@pytest.mark.smoke
@pytest.mark.parametrize("form", [["--json"], []])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_enough_sees_no_error(form, unbuffered):
    large = ["--nodes", "10000x8", "--request", "4096x8", *form]  # As JSON, more than a pipe holds.
    with subprocess.Popen(
        [sys.executable, "-m", "raycrew.cluster_core", "plan", *large],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as plan:  # fmt: skip
        if form:
            assert plan.stdout.read(10) == '{"feasible'
        plan.stdout.close()
        assert plan.stderr.read() == ""
    assert plan.returncode == 1


@pytest.mark.smoke
def test_a_request_that_does_not_fit(capsys):
    status, out = said(capsys, "plan", "--nodes", "2x8,1x4", "--request", "3x8")
    assert status == 1 and "never fits" in out and "node-2" in out
    status, out = said(capsys, "plan", "--nodes", "2x8,1x4", "--request", "3x8", "--json")
    answer = json.loads(out)
    assert status == 1 and not answer["feasible"] and answer["impossible"] and answer["reasons"]


@pytest.mark.smoke
def test_domains_and_bundles(capsys):
    common = (
        "plan",
        "--nodes",
        "8x8",
        "--domain-size",
        "4",
        "--request",
        "4x8",
        "--json",
        "--segment-size",
        "4",
    )
    status, out = said(capsys, *common)
    nodes = [part["node"] for node in json.loads(out)["nodes"] for part in node]
    assert status == 0 and {int(name.split("-")[1]) // 4 for name in nodes} in ({0}, {1})
    status, _ = said(capsys, *common, "--bundle", "GPU=1,CPU=4", "--node-cpus", "31")
    assert status == 1
    status, _ = said(capsys, *common, "--bundle", "GPU=1,CPU=4", "--node-cpus", "32")
    assert status == 0


@pytest.mark.smoke
@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--request", "1x8"],
        ["plan", "--request", "1x8", "--nodes", "1x8", "--address", "127.0.0.1:1"],
        ["plan", "--request", "0", "--nodes", "1x8"],
        ["status", "--address", "127.0.0.1:1"],
        ["status", "--address", "/tmp"],
    ],
)
def test_commands_that_cannot_work(arguments, capsys):
    assert main(arguments) == 2
    assert "Error: " in capsys.readouterr().err


@pytest.mark.smoke
@pytest.mark.parametrize("wrong", ["8y", "-1", "x8", ""])
def test_counts_that_mean_nothing(wrong, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--nodes", wrong, "--request", "1"])
    assert "argument --nodes" in capsys.readouterr().err


HELD = "held[b]-by-a-training-run"  # Brackets are no markup, and the name is long for a column.


def test_status_grid_and_plan_of_a_running_cluster(ray_nodes, capsys, monkeypatch):
    group = ray.util.placement_group([{"GPU": 1}] * 3, strategy="STRICT_PACK", name=HELD)
    assert group.wait(60)
    status, out = said(capsys, "status", "--json")
    nodes = json.loads(out)["nodes"]
    free = sorted(node["free"]["GPU"] for node in nodes)
    assert status == 0 and free == [1, 4, 4]
    assert [HELD in "".join(node["holders"]) for node in nodes].count(True) == 1
    assert set(nodes[0]["total"]) == {"CPU", "GPU"}
    status, out = said(capsys, "status")
    assert status == 0 and "1/4 GPU" in out and HELD in out
    monkeypatch.setenv("COLUMNS", "60")
    status, out = said(capsys, "status")
    assert f"'{HELD}'(3GPU)" in re.sub(r"[│\s]", "", out), "a name is cut off"

    status, out = said(capsys, "grid", "--json")
    [node] = json.loads(out)
    assert [bundle["held_by"] for bundle in node["bundles"]] == [[HELD]] * 3
    status, out = said(capsys, "grid")
    assert re.search(r"held\[b\]\S* 2 ", out) and "2 of 3 nodes hold no placement group" in out

    def on(bundle, rank):
        place = {"placement_group": group.id.hex(), "placement_bundle": bundle}
        return {"rank": rank, "state": "ready", "private_bytes": None, **place}

    report = {"name": "policy", "states": {}, "workers": [on(0, 0)], "standbys": [on(1, -1), on(2, -1)]}
    monkeypatch.setattr(commands, "occupants", lambda _: ([report], []))
    _, out = said(capsys, "grid", "--json")
    drawn = [(w["group"], w["rank"]) for bundle in json.loads(out)[0]["bundles"] for w in bundle["workers"]]
    assert drawn == [("policy", 0), ("policy standby", 0), ("policy standby", 1)]

    status, out = said(capsys, "plan", "--address", ray_nodes, "--request", "3x4", "--json")
    assert status == 1 and "held" in "".join(json.loads(out)["reasons"])
    status, out = said(capsys, "plan", "--address", ray_nodes, "--request", "2x4,1", "--json")
    assert status == 0
    [one] = json.loads(out)["nodes"][2]
    status, out = said(capsys, "plan", "--address", ray_nodes, "--request", "2x4,1")
    assert f"({one['node'][:8]})" in out and "fits: 9 bundles" in out


def test_plan_takes_nodes_in_a_given_order(capsys):
    assert main(["plan", "--nodes", "3x8", "--request", "2x8", "--order", "node-2,node-0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["order"] == ["node-2", "node-0"]
    assert [one[0]["node"] for one in found["nodes"]] == ["node-2", "node-0"]


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("node-9", "'node-9' is how 0 node ids begin"),
        ("node", "'node' is how 2 node ids begin"),
        ("node-1,node-1", "'node-1' names a node again"),
        ("", "'' is how 2 node ids begin"),
    ],
)
def test_an_order_that_names_no_node_is_refused(order, said, capsys):
    assert main(["plan", "--nodes", "2x8", "--request", "1", "--order", order]) == 2
    assert said in capsys.readouterr().err


def test_reasons_are_whole_lines_through_a_pipe(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    bundle = ",".join(f"resource-{i}=1" for i in range(40))
    assert main(["plan", "--nodes", "1x8", "--request", "9", "--bundle", bundle]) == 1
    first, needed, *_ = capsys.readouterr().out.splitlines()
    assert first == "It never fits:"
    assert needed.startswith("  needed: 1 x 9 bundles") and needed.endswith("on empty nodes for 0")


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--bundle", "GPU=inf"], "'inf' is no amount"),
        (["--bundle", "GPU=nan"], "'nan' is no amount"),
        (["--bundle", "GPU=-1"], "'-1' is no amount"),
        (["--bundle", "=1"], "'=1' is not NAME=AMOUNT"),
        (["--bundle", "GPU"], "'GPU' is not NAME=AMOUNT"),
        (["--bundle", "GPU=1,GPU=2"], "names GPU twice"),
        (["--node-cpus", "nan"], "'nan' is no amount"),
        (["--node-cpus", "-5"], "'-5' is no amount"),
        (["--bundle", "CPU=4", "--node-cpus", "64"], "--node-cpus does, too"),
        (["--domain-size", "0", "--segment-size", "1"], "'0' is no whole number above 0"),
        (["--domain-size", "-2", "--segment-size", "1"], "'-2' is no whole number above 0"),
    ],
)
def test_a_plan_of_what_can_not_be_meant_is_refused(capsys, arguments, told):
    assert_bad_usage(capsys, ["plan", "--nodes", "4x8", "--request", "2x8", "--json", *arguments], told)


@pytest.mark.hostile
@pytest.mark.parametrize("arguments", [["--node-cpus", "4"], ["--domain-size", "2"]])
def test_what_is_of_nodes_that_are_made_up_is_not_of_a_cluster(capsys, arguments):
    asked = ["plan", "--address", "127.0.0.1:1", "--request", "2x8", "--json", *arguments]
    assert_bad_usage(capsys, asked, "are of --nodes, not of a cluster that runs")


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--port-range", "9000-8000"], "is reversed"),
        (["--port-range", "80-90"], "reaches outside 1024-65535"),
        (["--address", "127.0.0.1:1"], "doctor takes either --local or --address"),
    ],
)
def test_the_doctor_refuses_what_can_not_be_looked_at(capsys, arguments, told):
    assert_bad_usage(capsys, ["doctor", "--local", "--json", *arguments], told)


def assert_bad_usage(capsys, arguments, told):
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert (status, told in message) == (2, True), message
