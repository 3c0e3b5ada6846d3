"""Which running cluster a driver without an address joins, and how the token is handled: no Ray needed."""

import os
import stat
from types import SimpleNamespace

import psutil
import pytest

from raycrew.cluster_core._connection.addresses import split_address
from raycrew.cluster_core._connection.discovery import (
    DEVICES_LABEL,
    SLURM_LABEL,
    RunningCluster,
    choose,
    devices_tag,
    parse_node_command,
    recorded_address,
    running_clusters,
)
from raycrew.cluster_core._connection.target import target_of
from raycrew.cluster_core._connection.token import child_authentication, protect_token, read_token
from raycrew.cluster_core.errors import NoClusterError

pytestmark = pytest.mark.smoke

STARTED = RunningCluster("a:1", {DEVICES_LABEL: "0_1"})
ALL = RunningCluster("b:1", {DEVICES_LABEL: "all"})
HAND = RunningCluster("c:1")
SLURM = RunningCluster("d:1", {}, frozenset({"CPU", "slurm_managed_ray_cluster"}))
JOB = RunningCluster("e:1", {SLURM_LABEL: "42"})
AROUND = RunningCluster("f:1", steps_up=2)
OUTER = RunningCluster("g:1", steps_up=5)

# running, tag, recorded, slurm job -> chosen, and a word of why
TABLE = {
    "none": ((), "all", "c:1", "42", None, ""),
    "somebody's own": ((HAND,), "all", None, None, None, ""),
    "what ray start recorded": ((STARTED, HAND), "0_1", "c:1", None, HAND, "`ray start`"),
    "a record of the past": ((STARTED,), None, "c:1", None, None, ""),
    "a record of raycrew's own cluster is no ray start": ((STARTED,), "2", "a:1", None, None, ""),
    "the same devices": ((ALL, STARTED), "0_1", None, None, STARTED, "same devices"),
    "other devices": ((ALL, STARTED), "2", None, None, None, ""),
    "no devices": ((ALL, STARTED), None, None, None, None, ""),
    "slurm tag": ((HAND, SLURM), None, "c:1", "42", SLURM, "a Slurm job"),
    "slurm tag from outside of the job": ((SLURM,), None, None, None, SLURM, "a Slurm job"),
    "this job before any tag": ((SLURM, JOB), None, None, "42", JOB, "Slurm job 42"),
    "another job": ((JOB,), None, None, "43", None, ""),
    "the one whose worker started this": ((JOB, HAND, AROUND), "0", "c:1", "42", AROUND, "a worker of it"),
    "of nested ones the innermost": ((OUTER, AROUND), None, None, None, AROUND, "a worker of it"),
    "of nested ones the innermost, whoever is older": ((AROUND, OUTER), "0", None, None, AROUND, "a worker"),
}


@pytest.mark.parametrize("case", TABLE)
def test_choice(case):
    running, tag, recorded, job, expected, why = TABLE[case]
    cluster, said = choose(running, tag, recorded, job) or (None, "")
    assert cluster is expected and why in said


# wanted, RAY_ADDRESS, running -> address, whether it is found, and a word of why
TARGETS = {
    "an address": ("h:1", "i:1", [AROUND], "h:1", False, "was given"),
    "an address in the environment": (None, "i:1", [AROUND], "i:1", False, "RAY_ADDRESS names it"),
    "auto in the environment": ("auto", "i:1", [], "i:1", False, "RAY_ADDRESS names it"),
    "local": ("local", "i:1", [AROUND], None, False, "the address is 'local'"),
    "local in the environment": (None, "local", [AROUND], None, False, "RAY_ADDRESS is 'local'"),
    "one that is found": (None, "", [AROUND], "f:1", True, "a worker of it"),
    "one that is found by auto": ("auto", "", [AROUND], "f:1", True, "a worker of it"),
    "none": (None, "", [], None, False, "none to join was found"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_which_cluster_is_meant_and_why(case, tmp_path):
    wanted, named, running, address, is_found, why = TARGETS[case]
    environ = {"RAY_ADDRESS": named, "RAY_TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    target = target_of(wanted, environ, running=lambda: running)
    assert (target.address, target.is_found) == (address, is_found) and why in target.why


def test_auto_never_means_a_fresh_cluster(tmp_path):
    environ = {"RAY_TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    for wanted, named in (("auto", ""), (None, "auto")):
        with pytest.raises(NoClusterError, match="no running Ray cluster"):
            target_of(wanted, {**environ, "RAY_ADDRESS": named}, running=list)
    with pytest.raises(ValueError, match="is a path"):
        target_of(None, {**environ, "RAY_ADDRESS": "/tmp/ray"}, running=list)


def test_nodes_of_one_cluster_are_told_together():
    first, second = RunningCluster("a:1", steps_up=7), RunningCluster("a:1", {"x": "y"}, steps_up=3)
    for one, other in ((first, second), (second, first)):
        both = one.joined_with(other)
        assert both.steps_up == 3 and both.labels == {"x": "y"}


@pytest.fixture
def node_processes(monkeypatch):
    """Puts node processes onto this machine, each above the one before: process id, address and start."""

    def put(*nodes):
        made, above = [], None
        for pid, address, began in reversed(nodes):
            info = {"name": "raylet", "uids": SimpleNamespace(real=os.getuid()), "create_time": began}
            info["cmdline"] = ["raylet", f"--gcs-address={address}"]
            parent = (lambda one: lambda: one)(above)
            above = SimpleNamespace(pid=pid, info=info, environ=dict, parent=parent)
            made.append(above)
        monkeypatch.setattr(psutil, "process_iter", lambda _: sorted(made, key=lambda one: one.pid))
        monkeypatch.setattr(psutil.Process, "parent", lambda _: above)

    return put


@pytest.mark.parametrize("pids", [(3, 7), (7, 3)])
def test_a_cluster_within_a_worker_of_another_is_the_one_of_what_its_workers_start(pids, node_processes):
    outer, inner = pids
    node_processes((inner, "inner:1", 2.0), (outer, "outer:1", 1.0))
    running = running_clusters()
    assert [one.address for one in running] == ["outer:1", "inner:1"]  # The newest last.
    chosen, why = choose(running, None, None, None)
    assert chosen.address == "inner:1" and "a worker of it" in why


@pytest.mark.hostile
@pytest.mark.parametrize("error", [psutil.AccessDenied, psutil.NoSuchProcess])
def test_ancestors_that_end_or_are_hidden_hide_no_cluster(error, node_processes, monkeypatch):
    def ppid(process):
        raise error(process.pid)

    real = psutil.Process.parent
    node_processes((4, "a:1", 1.0))
    monkeypatch.setattr(psutil.Process, "ppid", ppid)
    monkeypatch.setattr(psutil.Process, "parent", real)
    assert [one.address for one in running_clusters()] == ["a:1"]


@pytest.mark.parametrize(
    ("environ", "files", "tag"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, True, "0_1"),
        ({"CUDA_VISIBLE_DEVICES": "0, 1"}, False, "0_1"),
        ({"CUDA_VISIBLE_DEVICES": ""}, True, None),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, True, None),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, True, None),
        ({"HIP_VISIBLE_DEVICES": "3"}, True, "3"),
        ({}, True, "all"),
        ({}, False, None),
    ],
)
def test_devices_tag(environ, files, tag, tmp_path):
    (tmp_path / "nvidia0").touch()
    pattern = str(tmp_path / ("nvidia[0-9]*" if files else "davinci*"))
    assert devices_tag(environ, [pattern]) == tag


def test_many_uuids_make_a_tag_that_fits_into_a_label():
    uuids = [f"GPU-{i:08x}-0000-0000-0000-000000000000" for i in range(8)]
    tag = devices_tag({"CUDA_VISIBLE_DEVICES": ",".join(uuids)}, [])
    assert tag == devices_tag({"CUDA_VISIBLE_DEVICES": ",".join(reversed(uuids))}, [])
    assert len(tag) <= 63 and tag.isalnum()


def test_a_node_process():
    command = [
        "/x/raylet", "--head", "--gcs-address=10.0.0.1:6379", "--labels={\"raycrew.devices\": \"all\"}",
        "--static_resource_list=node:10.0.0.1,1.0,CPU,8,slurm_managed_ray_cluster,1", "--session_dir=/tmp/s",
    ]  # fmt: skip
    found = parse_node_command(command)
    assert (found.address, found.labels, found.session_dir) == (
        "10.0.0.1:6379",
        {DEVICES_LABEL: "all"},
        "/tmp/s",
    )
    assert found.resources == {"node:10.0.0.1", "CPU", "slurm_managed_ray_cluster"} and found.is_slurm_managed
    assert parse_node_command(["raylet"]) is None
    assert parse_node_command(["raylet", "--gcs-address=a:1", "--labels={"]).labels == {}


def test_several_nodes_of_a_cluster_on_one_machine_show_together_what_it_is():
    plain = RunningCluster("d:1", {"zone": "a"}, frozenset({"CPU"}), "/tmp/s")
    tagged = RunningCluster("d:1", {SLURM_LABEL: "42"}, frozenset(), "/tmp/s")
    for one, other in ((plain, SLURM), (SLURM, plain), (plain, tagged), (tagged, plain)):
        both = one.joined_with(other)
        assert both.is_slurm_managed and both.labels["zone"] == "a" and both.session_dir == "/tmp/s"


def test_the_record_of_ray_start(tmp_path):
    assert recorded_address({"RAY_TMPDIR": str(tmp_path)}) is None
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379\n")
    assert recorded_address({"RAY_TMPDIR": str(tmp_path)}) == "10.0.0.1:6379"
    assert recorded_address({}, str(tmp_path / "ray")) == "10.0.0.1:6379"


@pytest.mark.hostile
def test_what_others_may_have_put_in_place_of_the_record_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "ray").mkdir()
    record = tmp_path / "ray" / "ray_current_cluster"
    os.mkfifo(record)  # opened by a reader alone it would wait for a writer
    assert recorded_address({"TMPDIR": str(tmp_path)}) is None
    record.unlink()
    record.symlink_to("/dev/zero")
    assert recorded_address({"TMPDIR": str(tmp_path)}) is None
    record.unlink()
    record.write_bytes(b"10.0.0.1:6379\n" + bytes([255]) * (1 << 20))
    assert len(recorded_address({"TMPDIR": str(tmp_path)})) < 1000
    record.write_text("10.0.0.1:6379\n")
    assert recorded_address({"TMPDIR": str(tmp_path), "TEMP": "/not/rays"}) == "10.0.0.1:6379"
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert recorded_address({"TMPDIR": str(tmp_path)}) is None, "it is another user's"


def test_a_new_token_is_for_this_user_alone(tmp_path):
    file = tmp_path / "ray" / "token"
    protect_token({}, file)
    token = file.read_text()
    assert len(token) == 64 and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    file.chmod(0o644)
    protect_token({}, file)
    assert file.read_text() == token and stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "environ", [{"RAY_AUTH_TOKEN": "x"}, {"RAY_AUTH_TOKEN_PATH": "/x"}, {"RAY_AUTH_MODE": "disabled"}]
)
def test_no_token_is_made_where_none_is_needed(environ, tmp_path):
    protect_token(environ, tmp_path / "token")
    assert not (tmp_path / "token").exists()


def test_a_child_gets_the_name_of_the_tokens_file(tmp_path):
    file = tmp_path / "token"
    assert child_authentication({"RAY_AUTH_MODE": "token"}, file) == {"RAY_AUTH_MODE": "token"}
    file.write_text("hush")
    assert child_authentication({}, file) == {}
    assert child_authentication({"RAY_AUTH_MODE": "disabled"}, file) == {"RAY_AUTH_MODE": "disabled"}
    named = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
    assert child_authentication({"RAY_AUTH_MODE": "token"}, file) == named
    assert child_authentication(named, tmp_path / "other") == named
    by_value = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "v"}
    assert child_authentication(by_value, file) == by_value


def test_the_token_that_is_presented(tmp_path):
    file = tmp_path / "token"
    file.write_text("hush\n")
    assert read_token({}, file) is None
    assert read_token({"RAY_AUTH_MODE": "token"}, file) == "hush"
    assert read_token({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "v"}, file) == "v"
    assert read_token({"RAY_AUTH_MODE": "token"}, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("h:1", ("h", 1)),
        ("ray://h:10001", ("h", 10001)),
        ("[::1]:6379", ("::1", 6379)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
    ],
)
def test_addresses(address, expected):
    assert split_address(address) == expected
