"""One builds, the others wait: in other processes, in threads, and when the one that builds dies."""

import errno
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from builds import BUILD, SPEC, child_environment, key_being_built, wait_until, whole_fake

from raycrew.venv_manager import EnvironmentInUseError, Store, StoreError, StoreTimeoutError, collect, ensure
from raycrew.venv_manager._waiting.temporary import scratch


def _ensure_in(root, environ, barrier, results):
    barrier.wait()
    results.put(str(ensure(SPEC, store=Store(root, environ=environ)).python))


@pytest.mark.slow
@pytest.mark.parametrize("callers", [6, pytest.param(32, marks=pytest.mark.long)])
def test_many_callers_build_once(fake_store, fake_uv, callers):
    fake_uv.slow("pip install", 0.5)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(callers), context.SimpleQueue()
    processes = [
        context.Process(target=_ensure_in, args=(fake_store.root, dict(fake_store.environ), barrier, results))
        for _ in range(callers)
    ]
    for process in processes:
        process.start()
    paths = [results.get() for _ in processes]
    for process in processes:
        process.join()
    assert len(set(paths)) == 1
    assert (
        len(fake_uv.calls("venv"))
        == len(fake_uv.calls("pip install"))
        == len(fake_uv.calls("pip compile"))
        == 1
    )


def test_waiting_callers_hear_what_the_builder_does(fake_store, fake_uv):
    fake_uv.hold("pip install")
    builder = subprocess.Popen([sys.executable, "-c", BUILD], env=child_environment(fake_store))
    heard = []

    def hear(text):
        heard.append(text)
        if text.startswith("waiting: fake uv pip install (process "):
            fake_uv.release("pip install")

    try:
        wait_until(lambda: fake_uv.calls("pip install"))
        fake_store.install(key_being_built(fake_store), never, report=hear)
    finally:
        fake_uv.release("pip install")
        builder.wait(timeout=60)
    assert any(f"(process {builder.pid} on {platform.node()} since " in text for text in heard)


@pytest.mark.parametrize("end", ["killed", "failed"])
def test_a_waiting_caller_takes_over(fake_store, fake_uv, end):
    fake_uv.hold("pip install")
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILD], env=child_environment(fake_store), stderr=subprocess.DEVNULL
    )
    ended = threading.Event()

    def hear(text):
        if ended.is_set() or not text.startswith("waiting: "):
            return
        ended.set()
        if end == "killed":
            builder.kill()
        else:
            fake_uv.fail("pip install", "error: broken")
        fake_uv.release("pip install")
        builder.wait()
        fake_uv.fail("pip install", "")

    try:
        wait_until(lambda: fake_uv.calls("pip install"))
        key = key_being_built(fake_store)
        recipe = fake_store.recipe(key)
        built = fake_store.install(key, lambda: recipe, report=hear)
    finally:
        fake_uv.release("pip install")
        builder.wait()
    assert builder.returncode == (-signal.SIGKILL if end == "killed" else 1)
    assert whole_fake(built.path)


def test_a_caller_does_not_wait_for_ever(fake_store):
    key = ensure(SPEC, store=fake_store).key
    fake_store.remove_folder(fake_store.root / key)
    impatient = Store(fake_store.root, environ=fake_store.environ, build_timeout_s=0.1)
    with fake_store.locks(key).building(1.0), pytest.raises(StoreTimeoutError, match="held"):
        impatient.install(key, never)


def never():
    raise AssertionError("this caller must not build")


def test_callers_that_give_up_leave_one_thread_and_no_lock(fake_store):
    (fake_store.root / "locks").mkdir(parents=True)
    impatient = Store(fake_store.root, environ=fake_store.environ, build_timeout_s=0.01)
    threads, files = threading.active_count(), open_files()
    with fake_store.locks("abc").building(1.0):
        for _ in range(20):
            with pytest.raises(StoreTimeoutError, match="held"):
                impatient.install("abc", never)
        assert threading.active_count() <= threads + 1
        assert open_files() <= files + 3  # two of the builder, one of the thread
    with fake_store.locks("abc").building(60.0) as held:
        assert held is not None
    wait_until(lambda: threading.active_count() <= threads and open_files() <= files)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_files_that_cannot_be_locked(fake_store):
    (fake_store.root / "locks" / "abc.lock").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"abc\.lock cannot be locked.*file locks"):
        fake_store.install("abc", never)


def test_a_uv_that_outlives_its_killed_builder_is_waited_for(fake_store, fake_uv):
    fake_uv.hold("file")
    builder = subprocess.Popen([sys.executable, "-c", BUILD], env=child_environment(fake_store))
    heard = []

    def hear(text):
        heard.append(text)
        if text == "waiting: what a killed build started is still running":
            fake_uv.release("file")

    try:
        wait_until(lambda: list(fake_store.root.glob("*/venv/lib/*/site-packages/fake/part0.py")))
        builder.kill()
        builder.wait()
        key = key_being_built(fake_store)
        recipe = fake_store.recipe(key)
        built = fake_store.install(key, lambda: recipe, report=hear)
    finally:
        fake_uv.release("file")
        builder.wait()
    assert "waiting: what a killed build started is still running" in heard
    assert whole_fake(built.path)


def test_an_environment_in_use_is_not_replaced(fake_store):
    built = ensure(SPEC, store=fake_store)
    user = subprocess.Popen(
        [sys.executable, "-c", BUILD + "sys.stdout.flush(); sys.stdin.read()"],
        env=child_environment(fake_store), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert Path(user.stdout.readline().strip()) == built.python
        with pytest.raises(EnvironmentInUseError, match="in use"):
            ensure(SPEC, store=fake_store, force_rebuild=True)
    finally:
        user.communicate("")
    assert ensure(SPEC, store=fake_store, force_rebuild=True).stamp["created"] > built.stamp["created"]


def test_a_process_that_runs_from_it_counts_as_a_user(fake_store):
    built = ensure(SPEC, store=fake_store)
    user = subprocess.Popen(
        [built.python, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        user.stdout.readline()  # Until then Linux may show no command line of it.
        with pytest.raises(EnvironmentInUseError, match=str(user.pid)):
            ensure(SPEC, store=fake_store, force_rebuild=True)
    finally:
        user.communicate(b"\n")


def test_scratch_of_killed_processes_is_cleared_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = """
import sys
from raycrew.venv_manager._waiting.temporary import scratch
with scratch("raycrew-venv-test-") as folder:
    (folder / "file").write_text("")
    print(folder, flush=True)
    sys.stdin.read()
"""
    killed, alive = (
        subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    )  # fmt: skip
    try:
        left, used = (Path(process.stdout.readline().strip()) for process in (killed, alive))
        killed.kill()
        killed.wait()
        with scratch("raycrew-venv-test-") as mine:
            assert sorted(tmp_path.iterdir()) == sorted([mine, used])
            assert (used / "file").exists()
            assert left != used
    finally:
        killed.communicate()
        alive.communicate("")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_serves_what_it_has(fake_store, monkeypatch, number):
    """As NFS answers where its lock service does not run."""
    built = ensure(SPEC, store=fake_store)
    fake_store.locks(built.key).release()

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    assert ensure(SPEC, store=fake_store) == built
    for refused in (
        lambda: ensure(SPEC.replace(packages=("other",)), store=fake_store),
        lambda: ensure(SPEC, store=fake_store, force_rebuild=True),
        lambda: collect(fake_store, max_bytes=0),
    ):
        with pytest.raises(StoreError, match=r"cannot be locked.*needs a file system with file locks"):
            refused()
    assert fake_store.environments() == [built]
