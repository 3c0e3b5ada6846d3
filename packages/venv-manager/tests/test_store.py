import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from raycrew.venv_manager import (
    BuildFailedError,
    BuildTimeoutError,
    DiskFullError,
    EnvironmentInUseError,
    EnvironmentSpec,
    NetworkError,
    ProbeError,
    ReadOnlyStoreError,
    ResolutionError,
    Store,
    StoreError,
    StoreTimeoutError,
    UvNotFoundError,
    UvVersionError,
    ensure,
)

SPEC = EnvironmentSpec.requirements(["fake"], carry=False)


def version_in(environment, package):
    code = f"import {package}; print({package}.VERSION)"
    return subprocess.check_output([environment.python, "-c", code], text=True).strip()


@pytest.mark.smoke
def test_builds_once_and_then_answers_from_the_folder(fake_store, fake_uv):
    first = ensure(SPEC, store=fake_store)
    assert sorted(words[0] for words in fake_uv.calls()) == ["pip", "pip", "venv"]
    second = ensure(SPEC, store=fake_store)
    assert second == first
    assert len(fake_uv.calls()) == 3
    assert first.python == fake_store.root / first.key / "venv" / "bin" / "python"
    assert first.stamp["packages"] == {"fake": "1"}
    assert set(first.stamp["seconds"]) == {"resolve_s", "install_s", "inventory_s", "probe_s"}


def test_equal_specs_share_and_others_do_not(fake_store):
    one = ensure(EnvironmentSpec.requirements(["fake", "other"], carry=False), store=fake_store)
    same = ensure(EnvironmentSpec.requirements(["other", "fake", "other"], carry=False), store=fake_store)
    third = ensure(EnvironmentSpec.requirements(["fake"], carry=False), store=fake_store)
    assert same.key == one.key
    assert third.key != one.key


def test_force_builds_anew_with_newly_chosen_versions(fake_store, fake_uv):
    first = ensure(SPEC, store=fake_store)
    again = ensure(SPEC, store=fake_store, force_rebuild=True)
    assert again.key == first.key
    assert again.stamp["created"] > first.stamp["created"]
    assert len(fake_uv.calls("pip compile")) == 2


def test_the_environment_variable_forces_too(fake_store, fake_uv):
    ensure(SPEC, store=fake_store)
    forcing = Store(fake_store.root, environ={**fake_store.environ, "RAYCREW_FORCE_REBUILD_VENVS": "1"})
    ensure(SPEC, store=forcing)
    assert len(fake_uv.calls("venv")) == 2


def test_a_removed_environment_is_built_again_with_the_versions_it_had(fake_store, fake_uv):
    first = ensure(SPEC, store=fake_store)
    fake_store.remove_folder(first.path)
    ensure(SPEC, store=fake_store)
    assert len(fake_uv.calls("pip compile")) == 1
    assert len(fake_uv.calls("venv")) == 2


@pytest.mark.parametrize(
    ("verb", "words", "error"),
    [
        ("pip compile", "  x No solution found when resolving dependencies:", ResolutionError),
        ("pip compile", "error: error sending request for url (https://x/simple/fake/)", NetworkError),
        ("pip compile", "error: unexpected argument '--format' found", UvVersionError),
        ("venv", "error: No interpreter found for Python 3.99", ResolutionError),
        ("venv", "error: No space left on device (os error 28)", DiskFullError),
        ("pip install", "error: Failed to build `thing`\ngcc: not found", BuildFailedError),
    ],
)
def test_each_failure_is_an_error_of_its_own_and_publishes_nothing(fake_store, fake_uv, verb, words, error):
    fake_uv.fail(verb, words)
    with pytest.raises(error) as caught:
        ensure(SPEC, store=fake_store)
    assert words in str(caught.value)
    assert words in caught.value.tail
    assert caught.value.returncode == 2
    assert fake_store.environments() == []
    fake_uv.fail(verb, "")
    assert ensure(SPEC, store=fake_store).python.exists()


def test_a_uv_that_hangs_is_killed(fake_store, fake_uv):
    fake_uv.slow("venv", 300)
    impatient = Store(fake_store.root, environ=fake_store.environ, build_timeout_s=1.0)
    with pytest.raises(BuildTimeoutError, match="uv venv did not end"):
        ensure(SPEC, store=impatient)
    assert fake_store.environments() == []


def test_no_uv(tmp_path, fake_store):
    environ = {**fake_store.environ, "RAYCREW_UV": str(tmp_path / "nothing")}
    with pytest.raises(UvNotFoundError, match="RAYCREW_UV"):
        ensure(SPEC, store=Store(fake_store.root, environ=environ))


def test_an_environment_that_lacks_a_locked_package_is_not_published(fake_store, fake_uv):
    fake_uv.path.write_text(
        fake_uv.path.read_text().replace("Version: 1", "Version: 2").replace("fake-1", "fake-2")
    )
    with pytest.raises(StoreError, match=r"fake 1 \(2 is there\)"):
        ensure(SPEC, store=fake_store)
    assert fake_store.environments() == []


def test_an_environment_whose_interpreter_fails_is_not_published(fake_store, fake_uv):
    fake_uv.path.write_text(
        fake_uv.path.read_text().replace(f"os.symlink({sys.executable!r}", "os.symlink('/bin/false'")
    )
    with pytest.raises(ProbeError, match="ended with status 1"):
        ensure(SPEC, store=fake_store)
    assert fake_store.environments() == []


def test_a_read_only_store_serves_what_it_has(fake_store):
    built = ensure(SPEC, store=fake_store)
    environment = dict(fake_store.environ)
    code = f"""
        from pathlib import Path
        from raycrew.venv_manager import EnvironmentSpec, ReadOnlyStoreError, Store, ensure
        store = Store({str(fake_store.root)!r})
        print(ensure(EnvironmentSpec.requirements(["fake"], carry=False), store=store).key)
        store.name("alias", {built.key!r})
        try:
            ensure(EnvironmentSpec.requirements(["other"], carry=False), store=store)
        except ReadOnlyStoreError as error:
            print(error)
    """
    if os.geteuid() == 0:
        pytest.skip("root can write everywhere")
    with read_only(fake_store.root):
        output = subprocess.check_output(
            [sys.executable, "-c", textwrap.dedent(code)], text=True, env=environment
        )
    assert output.startswith(built.key)
    assert "RAYCREW_VENV_DIR" in output


@contextlib.contextmanager
def read_only(folder):
    modes = {path: path.stat().st_mode for path in (folder, folder / "locks")}
    try:
        for path in modes:
            path.chmod(0o555)
        yield
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def test_a_recipe_is_its_owners_and_a_torn_one_is_made_again(fake_store, fake_uv):
    built = ensure(SPEC, store=fake_store)
    (recipe,) = (fake_store.root / "recipes").iterdir()
    assert recipe.stat().st_mode & 0o777 == 0o600
    recipe.write_bytes(recipe.read_bytes()[:100])
    fake_store.remove_folder(built.path)
    assert ensure(SPEC, store=fake_store).key == built.key
    assert len(fake_uv.calls("pip compile")) == 2


def test_a_store_that_cannot_be_made(tmp_path, fake_store):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReadOnlyStoreError, match="cannot be made"):
        ensure(SPEC, store=Store(tmp_path / "file" / "store", environ=fake_store.environ))


def test_names_are_links_that_follow(fake_store):
    one = ensure(SPEC, store=fake_store)
    other = ensure(EnvironmentSpec.requirements(["other"], carry=False), store=fake_store)
    fake_store.name("pkg.Worker", one.key)
    fake_store.name("pkg.Worker", other.key)
    assert (fake_store.root / "by-name" / "pkg.Worker").resolve() == other.path / "venv"
    for name in ("", "..", "a/b", ".hidden"):
        with pytest.raises(ValueError, match="not a name"):
            fake_store.name(name, one.key)


def _ensure_in(root, environ, barrier, results):
    barrier.wait()
    results.put(str(ensure(SPEC, store=Store(root, environ=environ)).python))


@pytest.mark.slow
def test_32_callers_build_once(fake_store, fake_uv):
    fake_uv.slow("pip install", 0.5)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(32), context.SimpleQueue()
    processes = [
        context.Process(target=_ensure_in, args=(fake_store.root, dict(fake_store.environ), barrier, results))
        for _ in range(32)
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
    fake_uv.slow("venv", 1.5)
    builder = subprocess.Popen([sys.executable, "-c", BUILD], env=child_environment(fake_store))
    try:
        wait_until(lambda: fake_uv.calls("venv"))
        heard = []
        key = next(
            p.name.removesuffix(".lock") for p in fake_store.root.glob("locks/????????????????????????.lock")
        )
        fake_store.install(key, never, report=heard.append)
    finally:
        builder.wait(timeout=60)
    assert "waiting: fake uv venv" in heard


def test_a_caller_does_not_wait_for_ever(fake_store):
    key = ensure(SPEC, store=fake_store).key
    fake_store.remove_folder(fake_store.root / key)
    impatient = Store(fake_store.root, environ=fake_store.environ, build_timeout_s=0.1)
    with fake_store.locks(key).building(1.0), pytest.raises(StoreTimeoutError, match="held"):
        impatient.install(key, never)


def never():
    raise AssertionError("this caller must not build")


BUILD = """
import sys
from raycrew.venv_manager import EnvironmentSpec, ensure
print(ensure(EnvironmentSpec.requirements(["fake"], carry=False)).python)
"""


def child_environment(store):
    return {**store.environ, "RAYCREW_VENV_DIR": str(store.root)}


def wait_until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(condition)
        time.sleep(0.01)


def test_a_uv_that_outlives_its_killed_builder_is_waited_for(fake_store, fake_uv):
    fake_uv.files = 100
    fake_uv.slow("file", 0.02)
    builder = subprocess.Popen([sys.executable, "-c", BUILD], env=child_environment(fake_store))
    wait_until(lambda: list(fake_store.root.glob("*/venv/lib/*/site-packages/fake/part*.py")))
    builder.kill()
    builder.wait()
    fake_uv.slow("file", 0)
    heard = []
    found = ensure_and_hear(fake_store, heard)
    assert "waiting: the uv of a killed build is still running" in heard
    files = {p.name for p in found.path.glob("venv/lib/*/site-packages/fake/*.py")}
    assert files == {"__init__.py", *(f"part{n}.py" for n in range(100))}


def ensure_and_hear(store, heard):
    key = next(p.name.removesuffix(".lock") for p in store.root.glob("locks/????????????????????????.lock"))
    recipe = store.recipe(key)
    return store.install(key, lambda: recipe, report=heard.append)


KILL = """
import os, signal, sys
count, last = 0, int(sys.argv[1])
watched = {"open", "os.rename", "os.remove", "os.mkdir", "os.symlink", "os.rmdir", "subprocess.Popen",
           "fcntl.flock", "os.utime", "shutil.rmtree", "os.scandir"}
def hook(event, arguments):
    global count
    if event in watched and armed:
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
from raycrew.venv_manager import EnvironmentSpec, ensure
import concurrent.futures.thread, raycrew.venv_manager.testing
armed = False
sys.addaudithook(hook)
armed = True
ensure(EnvironmentSpec.requirements(["fake"], carry=False))
armed = False
print(count)
"""


@pytest.mark.slow
def test_killed_at_any_step_leaves_a_store_that_works(tmp_path, fake_uv):
    """SIGKILL at steps spread over a whole build: opening, renaming, removing, locking, starting uv."""
    environ = {**os.environ, **fake_uv.environ}

    def run(store, last):
        return subprocess.run(
            [sys.executable, "-c", KILL, str(last)], env={**environ, "RAYCREW_VENV_DIR": str(store)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    whole = run(tmp_path / "whole", 0)
    steps = int(whole.stdout)
    assert steps > 40
    points = sorted({*range(1, steps, max(1, steps // 16)), *range(steps - 8, steps)})
    for point in points:
        root = tmp_path / f"killed-{point}"
        assert run(root, point).returncode == -signal.SIGKILL, f"step {point} was not reached"
        store = Store(root, environ=environ)
        for visible in store.environments():
            assert whole_fake(visible.path), f"half built after step {point}"
        after = run(root, 0)
        assert after.returncode == 0, after.stderr
        (built,) = store.environments()
        assert whole_fake(built.path), f"half built after step {point} and another call"


def whole_fake(path):
    names = {p.name for p in path.glob("venv/lib/*/site-packages/fake/*.py")}
    return (
        names == {"__init__.py", "part0.py", "part1.py", "part2.py"} and (path / "venv/bin/python").exists()
    )


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
