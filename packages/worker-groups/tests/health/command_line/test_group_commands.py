"""`raycrew groups`, `top`, `stacks` and `diagnose`, and what `status` and `grid` tell of groups."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray
from patience import PATIENCE_S, eventually
from rich.console import Console
from workers import Latecomer, Patient

from raycrew.cluster_core.__main__ import main as raycrew
from raycrew.worker_groups import RayWorkerGroup, WorkerFailureError
from raycrew.worker_groups.__main__ import diagnose, groups, main, stacks, top
from raycrew.worker_groups._health import look, watches
from raycrew.worker_groups._health.command_line import commands
from raycrew.worker_groups._ray import records

PACKAGE = Path(__file__).parents[3]
SECRET = "hush-7f3a"


def told(capsys, command, *arguments):
    """Code and JSON of a command; on a busy machine nodes may take their time to answer."""
    patient = () if command is raycrew else ("--timeout", str(PATIENCE_S))
    code = command([*patient, *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])  # Ray may tell of the dead before


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """This package's entry points, as if it were installed as it is now."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / "raycrew_worker_groups-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: raycrew-worker-groups\nVersion: 0.1.0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(info.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


def elsewhere(*arguments):
    """A command in a process of its own, which is another driver."""
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-m", "raycrew.cluster_core", *arguments, "--address", address, "--json"],
        capture_output=True, text=True, timeout=4 * PATIENCE_S,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def alone(local_ray):
    """No test before has left a group that others are told of."""
    eventually(lambda: look() == [], "the groups of tests before are forgotten")


def test_groups_are_told_of_to_other_drivers(alone, cluster, installed, tmp_path, capsys, monkeypatch):
    gate = tmp_path / "gate"
    monkeypatch.setenv("API_KEY", SECRET)
    with RayWorkerGroup(
        cluster, Patient, name_prefix="pol[i]cy", secrets=["API_KEY"], env_vars={"MODE": SECRET}
    ) as group:
        pids = group.call("pid").get_results()
        group.call("say", f"the key is {SECRET}").get_results()
        sitting = group.on(ranks=[0]).call("sit_until", str(gate))
        eventually(lambda: group.get_worker_status(5)[0].method == "sit_until", "it sits")
        code, [other] = elsewhere("groups", "pol[i]cy", "--timeout", str(PATIENCE_S))
        first, second = other["workers"]
        assert (code, first["state"], first["method"], second["state"]) == (0, "busy", "sit_until", "ready")
        assert [w["pid"] for w in other["workers"]] == pids
        assert other["states"] == {"ready": 1, "busy": 1} and other["worker_class"] == "workers.Patient"
        assert all(w["private_bytes"] > 2**20 for w in other["workers"])
        assert [w["bundle_index"] for w in other["workers"]] == [0, 1]

        code, status = told(capsys, raycrew, "status")
        [listed] = status["worker_groups"]
        assert (code, listed["name"], listed["states"]) == (0, "pol[i]cy", other["states"])
        assert status["problems"] == []
        code, [node] = told(capsys, raycrew, "grid")
        seated = {w["rank"]: (w["group"], w["state"][:4]) for b in node["bundles"] for w in b["workers"]}
        assert seated == {0: ("pol[i]cy", "busy"), 1: ("pol[i]cy", "read")}
        monkeypatch.setenv("COLUMNS", "200")
        assert raycrew(["status"]) == 0 and groups([]) == 0 and raycrew(["grid"]) == 0 and top([]) == 0
        shown = capsys.readouterr().out
        assert shown.count("pol[i]cy: 2 ranks (1 ready, 1 busy)") == 2
        assert "1 ready, 1 busy" in shown and "sit_until" in shown and "pol[i]cy 0 busy" in shown
        assert SECRET not in shown + json.dumps(other)

        code, found = told(capsys, stacks)
        assert (code, [one["rank"] for one in found]) == (0, [0, 1])
        assert "sit_until" in found[0]["text"] and "sit_until" not in found[1]["text"]
        assert {one["told_by"] for one in found} <= {"py-spy", "faulthandler"}
        assert main(["stacks", "--rank", "1"]) == 0 and main(["status"]) == 0
        assert "pol[i]cy rank 1 (pid" in capsys.readouterr().out
        assert told(capsys, groups, "policy")[1]["error"]["message"].endswith("there are: pol[i]cy")

        bundles = ("--folder", str(tmp_path / "bundles"), "--timeout", str(PATIENCE_S))
        code, [left] = elsewhere("diagnose", "pol[i]cy", *bundles)
        (folder,) = (tmp_path / "bundles").iterdir()
        assert (code, left["folder"], folder.stat().st_mode & 0o777) == (0, str(folder), 0o700)
        assert [rank["state"] for rank in left["ranks"]] == ["busy", "ready"]
        assert "sit_until" in left["ranks"][0]["stacks"] and "sit_until" not in left["ranks"][1]["stacks"]
        assert json.loads((folder / "diagnosis.json").read_text()) == left
        assert SECRET not in (folder / "diagnosis.txt").read_text() + json.dumps(left)

        gate.touch()
        sitting.get_results(timeout=PATIENCE_S)
        os.kill(pids[1], signal.SIGKILL)
        eventually(lambda: told(capsys, groups)[1][0]["workers"][1]["state"] == "dead", "it is dead")
        assert told(capsys, groups)[0] == 1
        code, [after] = told(capsys, diagnose, *bundles, "--output", "5")
        assert (code, [rank["state"] for rank in after["ranks"]]) == (1, ["ready", "dead"])
        assert [rank["output"] for rank in after["ranks"]] == [f"the key is {SECRET}"] * 2, "also of the dead"
        group.restart_failed_workers()
        code, [again] = told(capsys, groups)
        assert (code, again["generation"]) == (0, 1)
        assert again["workers"][1]["pid"] == group.call("pid").get_results()[1]
    assert told(capsys, groups) == (0, [])
    assert told(capsys, raycrew, "status")[1]["worker_groups"] == []


@contextlib.contextmanager
def stopped_watches():
    """The processes that answer for this driver's workers do nothing meanwhile."""
    asked = [watch.__ray_call__.remote(lambda _: os.getpid()) for watch in watches._watches.values()]
    mine = [psutil.Process(pid) for pid in ray.get(asked, timeout=PATIENCE_S)]
    assert mine
    for watch in mine:
        watch.suspend()
    try:
        yield
    finally:
        for watch in mine:
            watch.resume()


@pytest.mark.hostile
def test_a_node_that_does_not_answer_is_not_waited_for(alone, cluster, capsys):
    with RayWorkerGroup(cluster, Patient, workers_per_node=1):
        with stopped_watches():
            code, [found] = told(capsys, groups, "--timeout", "1")
            [worker] = found["workers"]
            assert (code, worker["state"]) == (1, "unanswered")
            assert "did not answer within 1 s" in worker["note"]
            code, [found] = told(capsys, stacks, "--timeout", "1")
            assert (code, found["text"]) == (1, "") and "did not answer" in found["note"]
        eventually(lambda: told(capsys, groups)[0] == 0, "it answers again")


def test_a_group_that_hangs_in_its_start_is_told_of_until_that_ends(
    alone, cluster, installed, tmp_path, capsys
):
    def begun():
        return [worker["method"] for one in told(capsys, groups)[1] for worker in one["workers"]]

    with ThreadPoolExecutor(1) as beside:
        starting = beside.submit(RayWorkerGroup, cluster, Latecomer, gate=str(tmp_path / "gate"))
        try:
            eventually(lambda: begun() == [None, "__init__"], "one waits in it, the other one is done")
            note = r"starting for \d+ s: import and __init__, 1 of 2 ranks are done, not rank 1"
            eventually(lambda: re.fullmatch(note, told(capsys, groups)[1][0]["note"]), "that is said")
            code, [found] = told(capsys, groups)
            assert (code, found["states"]) == (0, {"starting": 1, "busy": 1})
            code, [_, hanging] = told(capsys, stacks)
            assert "await_file" in hanging["text"]
            findings = {one["check"]: one for one in told(capsys, raycrew, "doctor")[1]}
            assert "not rank 1" in findings["worker groups"]["detail"]
            assert raycrew(["status"]) == 0 and groups([]) == 0
            assert capsys.readouterr().out.count("starting for") == 2
        finally:
            (tmp_path / "gate").touch()
        with starting.result(PATIENCE_S) as group:
            _, [found] = told(capsys, groups)
            assert (found["note"], found["states"]) == ("", {"ready": 2})
            (tmp_path / "gate").unlink()
            os.kill(found["workers"][1]["pid"], signal.SIGKILL)
            eventually(lambda: group.ping(timeout=5).get(1) == "dead", "it is seen to be dead")
            again = beside.submit(group.restart_failed_workers)
            note = r"restarting for \d+ s: ranks \[1\]"
            eventually(lambda: re.fullmatch(note, told(capsys, groups)[1][0]["note"]), "that is said, too")
            assert told(capsys, groups)[1][0]["states"] == {"starting": 1, "ready": 1}
            (tmp_path / "gate").touch()
            assert again.result(PATIENCE_S) == [1]
            _, [found] = told(capsys, groups)
            assert (found["note"], found["states"]) == ("", {"ready": 2})
    with pytest.raises(WorkerFailureError, match="rank 1 can't start"):
        RayWorkerGroup(cluster, Latecomer, gate="")
    assert records("group/") == {}


DRIVER = """
import sys
from raycrew.cluster_core import RayVirtualCluster, init_ray
from raycrew.worker_groups import RayWorkerGroup
from workers import Patient
init_ray(sys.argv[1])
group = RayWorkerGroup(RayVirtualCluster([1], use_gpus=False), Patient, name_prefix="orphans")
print("started", flush=True)
sys.stdin.read()
"""
STARTS = """
import sys
from raycrew.cluster_core import RayVirtualCluster, init_ray
from raycrew.worker_groups import RayWorkerGroup
from workers import Patient
init_ray(sys.argv[1])
class Never:
    def python_for(self, *_):
        print("started", flush=True)
        sys.stdin.read()
RayWorkerGroup(
    RayVirtualCluster([1], use_gpus=False), Patient, name_prefix="orphans", environments=Never()
)
"""


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("driver", "states"),
    [
        pytest.param(DRIVER, {"ready": 1}, id="stands"),
        pytest.param(STARTS, {"starting": 1}, id="starts", marks=pytest.mark.long),
    ],
)
def test_a_group_whose_driver_was_killed_is_not_told_of(alone, local_ray, capsys, driver, states):
    address = ray.get_runtime_context().gcs_address
    with subprocess.Popen(
        [sys.executable, "-c", driver, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "started\n"
        eventually(lambda: told(capsys, groups)[1], "it is told of")
        [found] = told(capsys, groups)[1]
        assert (found["name"], found["states"]) == ("orphans", states)
        process.kill()
    eventually(lambda: told(capsys, groups) == (0, []), "nothing of it lives")
    assert records("group/") == {}


def test_top_draws_again_until_it_is_interrupted(alone, cluster):
    shown, looks = io.StringIO(), []

    def pause(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    with RayWorkerGroup(cluster, Patient, name_prefix="policy"):
        options = commands.argparse.Namespace(json=False, timeout=60.0, group=[], sort="cpu", interval=0.5)
        console = Console(file=shown, force_terminal=True, width=160, height=40)
        outcome = commands.run_top(options, console, pause)
    assert looks == [0.5] * 3 and outcome.code == 0
    assert shown.getvalue().count("policy: 2 ranks (2 ready)") == 3


@pytest.mark.parametrize(
    "wrong",
    [
        *(["--timeout", "0"], ["--timeout", "inf"], ["--sort", "age"], ["--rank", "x"]),
        *(["--output", "0"], ["--output", "-1"], ["--folder", "/dev/null/x"]),
    ],
)
@pytest.mark.smoke
def test_bad_usage_is_refused(wrong, capsys):
    command = {"--rank": stacks, "--output": diagnose, "--folder": diagnose}.get(wrong[0], groups)
    with pytest.raises(SystemExit) as end:
        command([*wrong, "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert (end.value.code, error["type"]) == (2, "UsageError")


@pytest.mark.parametrize("command", ["status", "top", "stacks"])
def test_the_package_is_a_program_too(command):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-m", "raycrew.worker_groups", command, "--timeout", "0", "--json"],
        env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, json.loads(done.stdout)["error"]["type"]) == (2, "UsageError")
