"""SIGKILL at any instant: nothing half built is ever visible, and the next caller builds."""

import json
import os
import signal
import subprocess
import sys

import pytest
from builds import whole_fake

from raycrew.venv_manager import Store
from raycrew.venv_manager.testing import write_project

pytestmark = pytest.mark.hostile

KILL = """
import collections, json, os, signal, sys
wanted, number = sys.argv[1].split(":")
counts, before = collections.Counter(), ""
watched = {"open", "os.rename", "os.remove", "os.mkdir", "os.symlink", "os.rmdir", "subprocess.Popen",
           "fcntl.flock", "os.utime", "shutil.rmtree", "os.scandir"}
def hook(event, arguments):
    global before
    if armed and event in watched:
        counts.update(("step", event, "after " + before))
        before = event
        if counts[wanted] == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
from raycrew.venv_manager import EnvironmentSpec, ensure
import concurrent.futures.thread, raycrew.venv_manager.testing

if len(sys.argv) > 2:
    spec = EnvironmentSpec.project(sys.argv[2], locked=True, carry=False)
else:
    spec = EnvironmentSpec.requirements(["fake"], carry=False)
armed = False
sys.addaudithook(hook)
armed = True
ensure(spec)
armed = False
print(json.dumps(counts))
"""


@pytest.fixture
def project(tmp_path):
    folder = write_project(tmp_path / "project", dependencies=["fake"])
    (folder / "uv.lock").write_text("version = 1\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("locked", "spread", "last"),
    [
        pytest.param(True, 3, 0, id="locked"),
        pytest.param(True, 14, 6, id="locked, at many steps", marks=pytest.mark.long),
        pytest.param(False, 14, 6, id="chosen by uv, at many steps", marks=pytest.mark.long),
    ],
)
def test_killed_at_any_step_leaves_a_store_that_works(tmp_path, fake_uv, project, locked, spread, last):
    """Steps spread over a whole build, its last, and its publication: opening, renaming and so on."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environ = {**os.environ, **fake_uv.environ, "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(store, last):
        return subprocess.run(
            [sys.executable, "-c", KILL, last, *([project] if locked else [])],
            env={**environ, "RAYCREW_VENV_DIR": str(store)}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    counts = json.loads(run(tmp_path / "whole", "step:0").stdout)
    steps, renames = counts["step"], counts["os.rename"]
    assert steps > 40
    assert {words[0] for words in fake_uv.calls()} == ({"sync", "export"} if locked else {"pip", "venv"})
    spread_out = {*range(1, steps, max(1, steps // spread)), *range(steps - last, steps)}
    publication = [f"{kind}:{renames}" for kind in ("os.rename", "after os.rename")]
    for point in [*(f"step:{step}" for step in sorted(spread_out)), *publication]:
        root = tmp_path / ("killed " + point.replace(":", " "))
        killed = run(root, point)
        kind, number = point.split(":")
        if killed.returncode == 0 and kind == "step":
            # the first time took more steps: more looks while it waited, or modules without bytecode yet
            assert json.loads(killed.stdout)["step"] < int(number)
        else:
            assert killed.returncode == -signal.SIGKILL, f"{point} was not reached"
        store = Store(root, environ=environ)
        for visible in store.environments():
            assert whole_fake(visible.path), f"half built after {point}"
        after = run(root, "step:0")
        assert after.returncode == 0, after.stderr
        (built,) = store.environments()
        assert whole_fake(built.path), f"half built after {point} and another call"
