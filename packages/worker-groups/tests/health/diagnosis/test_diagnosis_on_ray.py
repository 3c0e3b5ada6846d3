"""Diagnoses of groups on Ray, some of whose ranks are busy or dead."""

import json
import math
import os
import pickle
import signal

import pytest
from diagnosed_workers import Starter, Talker
from patience import PATIENCE_S, eventually

from raycrew.worker_groups import RayWorkerGroup, ResultTimeoutError, WorkerFailureError
from raycrew.worker_groups._health.diagnosis import automatic

SECRET = "s3cr3t-5f00d1"


@pytest.mark.hostile
def test_all_ranks_are_told_of_whatever_they_are_at(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("API_TOKEN", SECRET)
    monkeypatch.setattr(automatic, "_PAUSE_S", math.inf)
    prefix, gate = tmp_path / "nccl_", tmp_path / "gate"
    variables = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(prefix)}
    options = {"secrets": ("API_TOKEN",), "diagnose": tmp_path / "automatic"}
    with RayWorkerGroup(cluster, Talker, env_vars=variables, **options) as group:
        group.call("say", 9).get_results(timeout=PATIENCE_S)
        said = f"line 7\nline 8\nthe token is {SECRET}"
        assert group.logs(1, lines=2, timeout=PATIENCE_S) == said
        (tmp_path / "nccl_1").write_bytes(b"made up")
        waiting = group.on(ranks=[0]).call("wait_for", str(gate))
        eventually(lambda: group.get_worker_status(PATIENCE_S)[0].method == "wait_for", "it waits")
        os.kill(group.on(ranks=[1]).call("pid").get_results(timeout=PATIENCE_S)[0], signal.SIGKILL)
        eventually(lambda: group.get_worker_status(PATIENCE_S)[1] == "dead", "it is dead")

        diagnosis = group.diagnose(tmp_path / "bundles", timeout=PATIENCE_S)
        busy, dead = diagnosis.ranks
        assert (busy.state, busy.calls[0].method, busy.flight_record) == ("busy", "wait_for", "")
        assert "await_file" in busy.stacks and busy.told_by in ("py-spy", "faulthandler")
        assert (dead.state, dead.stacks) == ("dead", ""), "also while its process is ending"
        assert list(dead.missing) == ["stacks"]
        assert dead.output.endswith("line 8\nthe token is <API_TOKEN>")
        assert (diagnosis.folder / dead.flight_record).read_bytes() == b"made up"
        assert (dead.flight_record_path, dead.flight_record_is_own) == (f"{prefix}1", True)
        assert json.loads((diagnosis.folder / "diagnosis.json").read_text())["ranks"][1]["state"] == "dead"
        files = [path for path in diagnosis.folder.rglob("*") if path.is_file()]
        assert len(files) == 3 and not any(SECRET.encode() in path.read_bytes() for path in files)
        assert group.logs(1, lines=2, timeout=PATIENCE_S) == said, "after its death, too"
        with pytest.raises(ResultTimeoutError) as late:
            waiting.get_results(timeout=0.01)
        made = late.value.diagnosis
        assert made.parent == tmp_path / "automatic" and str(made) in str(late.value)
        assert "await_file" in (made / "diagnosis.txt").read_text()
        with pytest.raises(WorkerFailureError) as failed:
            group.on(ranks=[1]).call("pid").get_results(timeout=PATIENCE_S)
        assert failed.value.diagnosis == made, "it is of this moment"
        assert pickle.loads(pickle.dumps(group))._tell_diagnosis is None
        gate.touch()
        waiting.get_results(timeout=PATIENCE_S)


def test_a_start_that_fails_says_what_all_ranks_were_at(cluster, tmp_path):
    with pytest.raises(WorkerFailureError) as failed:
        RayWorkerGroup(cluster, Starter, diagnose=tmp_path, gate=str(tmp_path / "gate"))
    folder = failed.value.diagnosis
    assert folder.parent == tmp_path and str(folder) in str(failed.value)
    told = json.loads((folder / "diagnosis.json").read_text())
    assert "rank 1 can't start" in told["reason"]
    waiting, _ = told["ranks"]
    assert (waiting["state"], waiting["calls"][0]["method"]) == ("busy", "__init__")
    assert "await_file" in waiting["stacks"]
