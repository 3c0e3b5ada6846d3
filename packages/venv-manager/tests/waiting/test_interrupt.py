"""Ctrl-C: uv and the probe end with the command, what waits stops waiting, and nothing half built is left."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from builds import child_environment, wait_until, whole_fake

from raycrew.venv_manager import EnvironmentSpec, Store, ensure

COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have had it ignored
from raycrew.venv_manager import register_actor_environment, EnvironmentSpec
from raycrew.venv_manager.__main__ import main
from raycrew.venv_manager._store.building.carry import Luggage
from raycrew.venv_manager.provision._resolving import request
request.luggage = Luggage  # none, whatever is installed beside this package
for name in "fake", "held", "queued":
    register_actor_environment(f"tests.{name}", EnvironmentSpec.requirements([name], carry=False))
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def command(fake_store):
    """Start a command on the store."""
    started = []

    def start(*words):
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words], env=child_environment(fake_store),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def uv_processes(fake_uv):
    return [json.loads(line)[0] for line in (fake_uv.folder / "calls").read_text().splitlines()]


def assert_nothing_is_left(fake_store, fake_uv, process):
    output, said = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")
    assert "interrupted: what was being built is gone" in said
    assert "Traceback" not in said
    assert not list(fake_store.root.glob("????????????????????????"))
    assert not [pid for pid in uv_processes(fake_uv) if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("step", ["venv", "pip compile", "pip install"])
def test_a_build_ends_with_its_uv(command, fake_store, fake_uv, step):
    fake_uv.hold(step)
    process = command("ensure", "uv run --no-project --with fake")
    wait_until(lambda: fake_uv.calls(step))
    process.send_signal(signal.SIGINT)
    assert_nothing_is_left(fake_store, fake_uv, process)
    fake_uv.release(step)
    again = command("ensure", "uv run --no-project --with fake", "--json")
    (row,) = json.loads(again.communicate(timeout=60)[0])
    assert whole_fake(fake_store.root / row["key"])


def test_a_probe_ends_too(command, fake_store, fake_uv, tmp_path):
    python, mark = tmp_path / "python", tmp_path / "probed"
    python.write_text(f"#!/bin/sh\necho $$ >{mark}.new\nmv {mark}.new {mark}\nexec sleep 600\n")
    python.chmod(0o755)
    text = fake_uv.path.read_text()
    fake_uv.path.write_text(text.replace(f"os.symlink({sys.executable!r}", f"os.symlink({str(python)!r}"))
    process = command("ensure", "uv run --no-project --with fake")
    wait_until(mark.exists)
    process.send_signal(signal.SIGINT)
    assert_nothing_is_left(fake_store, fake_uv, process)
    assert not Path("/proc", mark.read_text().strip()).exists()


def test_prefetch_ends_what_it_builds_waits_for_and_has_not_begun(command, fake_store, fake_uv):
    held = ensure(EnvironmentSpec.requirements(["held"], carry=False), store=fake_store).key
    fake_store.remove_folder(fake_store.root / held)
    fake_uv.hold("pip install")
    with Store(fake_store.root).locks(held).building(60.0):
        process = command("prefetch", "--max-builds", "2")
        wait_until(lambda: len(fake_uv.calls("pip install")) == 2)  # one of them of this test
        process.send_signal(signal.SIGINT)
        assert_nothing_is_left(fake_store, fake_uv, process)
    assert len(fake_uv.calls("pip compile")) == 2
