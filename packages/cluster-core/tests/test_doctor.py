"""The doctor: says what is wrong, and what to do; says nothing against what is well."""

import json
import os
import socket
from dataclasses import replace

import pytest
import ray

from raycrew.cluster_core import doctor
from raycrew.cluster_core.__main__ import main
from raycrew.cluster_core._ray.questions import GroupState

FACTS = doctor.NodeFacts("host", "2.60.0", "3.11.7", 16 << 30, 65536, 1000.0, (32768, 60999))
smoke = pytest.mark.smoke


@smoke
@pytest.mark.parametrize(
    ("other", "state"),
    [
        ({}, "good"),
        ({"ray": "2.59.0"}, "bad"),
        ({"python": "3.12.1"}, "bad"),
        ({"python": "3.11.9"}, "doubtful"),
    ],
)
def test_versions(other, state):
    finding = doctor.check_versions({"a": FACTS, "b": replace(FACTS, **other)})
    assert finding.state == state
    assert all(value in finding.detail for value in other.values())


@smoke
def test_shared_memory():
    small = replace(FACTS, shared_bytes=64 << 20)
    assert doctor.check_shared_memory({"a": FACTS}).state == "good"
    finding = doctor.check_shared_memory({"a": FACTS, "b": small})
    assert (
        finding.state == "bad"
        and "a: 16.0 GiB; b: 0.1 GiB" in finding.detail
        and "shm-size" in finding.advice
    )


@smoke
def test_open_files():
    assert doctor.check_open_files({"a": FACTS}).state == "good"
    assert doctor.check_open_files({"a": replace(FACTS, open_files=1024)}).state == "doubtful"


@smoke
@pytest.mark.parametrize(
    ("ephemeral", "port_range", "state"),
    [
        ((32768, 60999), None, "good"),
        ((9000, 60999), None, "good"),
        ((1024, 65535), None, "bad"),
        ((32768, 60999), (30000, 32768), "bad"),
        ((32768, 60999), (60999, 61100), "bad"),
        ((32768, 60999), (61000, 61100), "good"),
    ],
)
def test_ports(ephemeral, port_range, state):
    assert doctor.check_ports({"a": replace(FACTS, ephemeral=ephemeral)}, port_range).state == state


@smoke
def test_clocks():
    assert doctor.check_clocks({"a": FACTS}, 999.0, 1002.0).state == "good"
    finding = doctor.check_clocks({"a": FACTS, "b": replace(FACTS, clock_s=1100.0)}, 999.0, 1002.0)
    assert finding.state == "doubtful" and "'b': 98.0" in finding.detail and "'a'" not in finding.detail


@smoke
def test_gcs_and_nodes():
    assert (doctor.check_gcs(0.01).state, doctor.check_gcs(3.0).state) == ("good", "doubtful")
    assert doctor.check_silent_nodes([]).state == "good"
    assert "abcd" in doctor.check_silent_nodes(["abcd"]).detail


@smoke
def test_groups():
    groups = [GroupState("a", "CREATED", "", (), ()), GroupState("b", "REMOVED", "", (), ())]
    assert doctor.check_groups(groups).state == "good"
    finding = doctor.check_groups([*groups, GroupState("c", "PENDING", "", (), ())])
    assert finding.state == "doubtful" and "c (PENDING)" in finding.detail
    finding = doctor.check_groups(groups, ["left (namespace n)"])
    assert finding.state == "doubtful" and "left (namespace n)" in finding.detail
    assert "get_placement_group(NAME)" in finding.advice


@smoke
def test_dashboard():
    assert doctor.check_dashboard(None).state == "skipped"
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert doctor.check_dashboard(url).state == "good"
    finding = doctor.check_dashboard(url)
    assert finding.state == "doubtful" and "ssh -L" in finding.advice


@smoke
def test_token(tmp_path):
    file = tmp_path / "token"
    assert doctor.check_token_file({}, file).state == "skipped"
    file.write_text("x")
    file.chmod(0o644)
    assert doctor.check_token_file({}, file).advice.endswith(f"chmod 600 {file}.")
    file.chmod(0o600)
    assert doctor.check_token_file({"RAY_AUTH_TOKEN_PATH": str(file)}).state == "good"


@smoke
@pytest.mark.parametrize(
    ("environ", "ancestors", "state"),
    [
        ({}, [["/usr/bin/uv", "run", "train.py"]], "doubtful"),
        ({"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}, [["/usr/bin/uv", "run", "train.py"]], "good"),
        ({}, [["bash"], [], ["python", "run"]], "good"),
    ],
)
def test_uv_run(environ, ancestors, state):
    assert doctor.check_uv_run(environ, ancestors).state == state


def test_a_healthy_cluster_with_a_group_that_waits(ray_nodes, capsys):
    group = ray.util.placement_group([{"GPU": 4}] * 9, strategy="PACK", name="too much")
    assert not group.wait(1)
    findings = {finding.check: finding for finding in doctor.examine()}
    assert findings["connection"].state == "good" and "3 nodes" in findings["connection"].detail
    assert findings["versions"].state == findings["nodes"].state == findings["GCS"].state == "good"
    assert "too much" in findings["placement groups"].detail
    ray.util.remove_placement_group(group)
    main(["doctor", "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert {"check", "state", "detail", "advice"} == set(listed[0])
    assert main(["doctor", "--port-range", "{}-{}".format(*FACTS.ephemeral)]) == 1
    assert "reaches into the ephemeral ports" in " ".join(capsys.readouterr().out.split())


def test_no_cluster_is_a_finding_and_starts_nothing(monkeypatch, tmp_path):
    ray.shutdown()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    finding = doctor.examine()[-1]
    assert (finding.check, finding.state) == ("connection", "bad") and "NoClusterError" in finding.detail
    assert not ray.is_initialized()
    assert all(one.check != "connection" for one in doctor.examine(None))


def test_facts_of_this_machine():
    facts = doctor.read_node_facts()
    assert facts.ray == ray.__version__ and facts.host == os.uname().nodename
