"""Many callers at once, holders that are stopped, and kills at any moment."""

import multiprocessing
import os
import platform
import random
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from builds import BUILD, SPEC, child_environment, key_being_built, wait_until, whole_fake

from raycrew.venv_manager import EnvironmentSpec, Store, StoreTimeoutError, ensure

pytestmark = pytest.mark.hostile


def _ensure_many(root, environ, barrier, results):
    """Eight threads of one process, which ask for two environments."""
    store, found = Store(root, environ=environ), []

    def ask(number):
        barrier.wait()
        name = ("demo", "leaf")[number % 2]
        found.append(str(ensure(EnvironmentSpec.requirements([name], carry=False), store=store).python))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(found)


@pytest.mark.slow
def test_threads_of_several_processes_build_each_environment_once(tmp_path, environ):
    """Real uv: each writes to a log when it installs."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(12), context.SimpleQueue()
    log, uv = tmp_path / "log", tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\necho "$1 $2" >>{log}\nexec "{_uv(environ)}" "$@"\n')
    uv.chmod(0o755)
    environ = environ | {"RAYCREW_UV": str(uv)}
    processes = [
        context.Process(target=_ensure_many, args=(tmp_path / "store", environ, barrier, results))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    paths = [path for _ in processes for path in results.get()]
    for process in processes:
        process.join()
    assert len(paths) == 12
    assert len({*paths}) == 2
    said = log.read_text().splitlines()
    assert said.count("pip compile") == said.count("pip install") == 2


def _uv(environ):
    from raycrew.venv_manager._uv import find_uv

    return find_uv(environ)


@pytest.mark.parametrize("step", ["pip compile", "pip install"])
def test_who_waits_for_a_stopped_process_names_it_and_keeps_its_deadline(fake_store, fake_uv, step):
    fake_uv.hold(step)
    builder = subprocess.Popen([sys.executable, "-c", BUILD], env=child_environment(fake_store))
    try:
        wait_until(lambda: fake_uv.calls(step))
        builder.send_signal(signal.SIGSTOP)
        impatient = Store(fake_store.root, environ=fake_store.environ, build_timeout_s=0.5)
        with pytest.raises(StoreTimeoutError) as caught:
            ensure(SPEC, store=impatient)
        holder = rf"process {builder.pid} on {platform.node()} since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        assert re.search(holder, str(caught.value))
    finally:
        builder.send_signal(signal.SIGCONT)
        fake_uv.release(step)
        assert builder.wait(timeout=60) == 0
    assert ensure(SPEC, store=fake_store).python.exists()
    assert fake_store.locks(fake_store.environments()[0].key).holder() == ""


PROBING = """
import sys
from raycrew.venv_manager._store.building import probing
probing._SCRIPT = f'''
import os, time
open({sys.argv[1]!r}, "a").close()
while os.path.exists({sys.argv[1]!r}):
    time.sleep(0.01)
''' + probing._SCRIPT
"""


def test_what_a_killed_build_has_started_is_waited_for(fake_store, tmp_path):
    gate, heard = tmp_path / "gate", []
    command = [sys.executable, "-c", PROBING + BUILD, str(gate)]
    builder = subprocess.Popen(command, env=child_environment(fake_store))

    def hear(text):
        heard.append(text)
        if text == "waiting: what a killed build started is still running":
            gate.unlink(missing_ok=True)

    try:
        wait_until(gate.exists)
        builder.kill()
        builder.wait()
        key = key_being_built(fake_store)
        recipe = fake_store.recipe(key)
        assert whole_fake(fake_store.install(key, lambda: recipe, report=hear).path)
    finally:
        gate.unlink(missing_ok=True)
    assert "waiting: what a killed build started is still running" in heard


LEAVING = """
from raycrew.venv_manager._store.building import probing
probing._SCRIPT = '''
import os, sys, time
if os.fork() == 0:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(1, 2)
    open(os.environ["LEFT"] + ".new", "w").write(str(os.getpid()))
    os.rename(os.environ["LEFT"] + ".new", os.environ["LEFT"])
    time.sleep(3600)
while not os.path.exists(os.environ["LEFT"]):
    time.sleep(0.01)
''' + probing._SCRIPT
"""


def test_what_a_probe_leaves_behind_holds_nobody_up(fake_store, tmp_path):
    left = tmp_path / "left"
    environ = child_environment(fake_store) | {"LEFT": str(left)}
    try:
        subprocess.run([sys.executable, "-c", LEAVING + BUILD], env=environ, check=True, capture_output=True)
        with fake_store.locks(fake_store.environments()[0].key).building(1.0) as held:
            assert held is not None
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)


REAL = """
from raycrew.venv_manager import EnvironmentSpec, ensure
ensure(EnvironmentSpec.requirements(["base"], carry=False))
"""


@pytest.mark.slow
@pytest.mark.long
def test_builds_that_are_killed_at_random_moments_leave_nothing_half_built(tmp_path, environ, uv_cache):
    """Real uv and wheels of a local index; all in one store, so that each takes up what others left."""
    store = Store(tmp_path / "store", environ=environ)
    (tmp_path / "scratch").mkdir()
    variables = child_environment(store) | {"TMPDIR": str(tmp_path / "scratch")}
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", REAL], env=variables, check=True)
    took, moments = time.monotonic() - start, random.Random(7)
    for number in range(20):
        for environment in store.environments():
            if number % 2:
                store.remove_folder(environment.path)
        builder = subprocess.Popen([sys.executable, "-c", REAL], env=variables, start_new_session=True)
        try:
            builder.wait(timeout=moments.uniform(0.3, 1.0) * took)
        except subprocess.TimeoutExpired:
            os.kill(builder.pid, signal.SIGKILL)  # its uv lives on
            builder.wait()
        for visible in store.environments():
            assert _works(visible), f"half built after kill {number}"
    good = ensure(EnvironmentSpec.requirements(["base"], carry=False), store=store)
    assert _works(good)
    assert good.stamp["packages"] == {"base": "1.0", "leaf": "1.1"}


def _works(environment):
    code = "import base, leaf; print(base.VERSION, leaf.VERSION)"
    return subprocess.check_output([environment.python, "-c", code], text=True).split() == ["1.0", "1.1"]
