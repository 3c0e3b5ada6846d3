import os
import subprocess
import sys
import threading
import time

import pytest
from builds import wait_until

from raycrew.venv_manager import EnvironmentSpec, collect, ensure, verify
from raycrew.venv_manager._store import upkeep
from raycrew.venv_manager.testing import write_project


def spec(*names):
    return EnvironmentSpec.requirements(names, carry=False)


def forget_use(store):
    """As if the processes that asked for the environments had ended."""
    for environment in store.environments():
        store.locks(environment.key).release()


def age(store, environment, days):
    then = time.time() - days * 86400
    os.utime(store.root / "locks" / f"{environment.key}.used", (then, then))


@pytest.mark.smoke
def test_a_fresh_environment_has_not_drifted(store):
    built = ensure(spec("base"), store=store)
    assert verify(store, built, contents=True).ok


def test_drift_is_shown_file_by_file_and_package_by_package(store, environ):
    built = ensure(spec("base"), store=store)
    site = next(built.path.glob("venv/lib/*/site-packages"))
    (site / "stray.py").write_text("")
    (site / "base" / "__init__.py").unlink()
    (site / "base" / "__init__.py").write_text('VERSION = "9.9"\n')  # as long as before
    (site / "leaf" / "__init__.py").unlink()
    (site / "leaf-1.1.dist-info").rename(site / "leaf-9.dist-info")
    drift = verify(store, built, contents=True)
    assert not drift.ok
    assert [name.rsplit("/", 1)[1] for name in drift.added if "dist-info" not in name] == ["stray.py"]
    assert any(name.endswith("leaf/__init__.py") for name in drift.removed)
    assert [name.rsplit("/", 2)[1:] for name in drift.changed] == [["base", "__init__.py"]]
    assert drift.packages == {"leaf": "1.1 -> 9"}


@pytest.mark.hostile
def test_an_edit_that_hides_its_traces_is_found_by_content(store):
    built = ensure(spec("base"), store=store)
    path = next(built.path.glob("venv/lib/*/site-packages/base/__init__.py"))
    before = path.stat()
    path.unlink()
    path.write_text('VERSION = "9.9"\n')
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert verify(store, built).ok
    assert [name.rsplit("/", 2)[1] for name in verify(store, built, contents=True).changed] == ["base"]


def test_bytecode_that_running_leaves_is_no_drift(store):
    built = ensure(spec("base"), store=store)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([built.python, "-c", "import base, leaf"], check=True, env=environment)
    assert list(built.path.glob("venv/lib/*/site-packages/base/__pycache__/*"))
    assert verify(store, built, contents=True).ok


def test_an_interpreter_that_fails_is_drift(store):
    built = ensure(spec("base"), store=store)
    built.python.unlink()
    built.python.symlink_to("/no/such/python")
    drift = verify(store, built)
    assert not drift.ok
    assert "no interpreter" in " ".join(drift.notes)


def test_a_checkout_that_moved_is_noted_and_found_by_content(store, tmp_path):
    project = write_project(tmp_path / "here", dependencies=["demo"])
    built = ensure(EnvironmentSpec.project(project, carry=False), store=store)
    project.rename(tmp_path / "there")
    drift = verify(store, built)
    assert drift.ok
    assert f"no longer at {tmp_path / 'here'}" in drift.notes[0]
    assert ensure(EnvironmentSpec.project(tmp_path / "there", carry=False), store=store).key == built.key


def test_gc_removes_by_age_and_keeps_what_is_named(fake_store):
    old, named, new = (ensure(spec(name), store=fake_store) for name in ("one", "two", "three"))
    fake_store.name("kept", named.key)
    forget_use(fake_store)
    age(fake_store, old, 30)
    age(fake_store, named, 30)
    assert [
        r.name for r in collect(fake_store, older_than_days=7, keep=["kept"], dry_run=True) if r.freed_bytes
    ] == [old.key]
    assert len(fake_store.environments()) == 3
    rows = {r.name: r for r in collect(fake_store, older_than_days=7, keep=["kept"])}
    assert rows[old.key].removed
    assert rows[named.key].reason == "kept by name"
    assert {e.key for e in fake_store.environments()} == {named.key, new.key}
    assert fake_store.recipe(old.key) is None


def test_gc_by_size_begins_with_the_longest_unused(fake_store):
    built = [ensure(spec(name), store=fake_store) for name in ("one", "two", "three")]
    fake_store.name("gone", built[1].key)
    (fake_store.root / "by-name" / "stray").write_text("no name")
    forget_use(fake_store)
    for days, environment in zip((1, 3, 2), built, strict=True):
        age(fake_store, environment, days)
    limit = sum(e.stamp["own_bytes"] for e in built) - 1
    assert [r.name for r in collect(fake_store, max_bytes=limit)] == [built[1].key]
    assert not (fake_store.root / "by-name" / "gone").is_symlink()
    assert len(collect(fake_store, max_bytes=0)) == 2
    assert fake_store.environments() == []


@pytest.mark.hostile
def test_gc_keeps_what_is_in_use(fake_store):
    asked = ensure(spec("asked"), store=fake_store)
    running = ensure(spec("running"), store=fake_store)
    fake_store.locks(running.key).release()
    user = subprocess.Popen(
        [running.python, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        user.stdout.readline()  # Until then Linux may show no command line of it.
        rows = {r.name: r for r in collect(fake_store, max_bytes=0)}
    finally:
        user.communicate(b"\n")
    assert "process that asked for it" in rows[asked.key].reason
    assert str(user.pid) in rows[running.key].reason
    assert len(fake_store.environments()) == 2


@pytest.mark.hostile
def test_gc_clears_what_interrupted_builds_and_removals_left(fake_store):
    whole = ensure(spec("one"), store=fake_store)
    half, old = "0123456789abcdef01234567", "0123456789abcdef01234568-01234567"
    (fake_store.root / half / "venv").mkdir(parents=True)
    (fake_store.root / "trash" / old).mkdir(parents=True)
    (fake_store.root / "trash" / old / "file").write_text("x" * 1000)
    rows = collect(fake_store)
    assert {r.name: r.reason for r in rows} == {
        half: "left by an interrupted build",
        old: "left by an interrupted removal",
    }
    assert sum(r.freed_bytes for r in rows) == 1000
    assert [e.key for e in fake_store.environments()] == [whole.key]
    assert collect(fake_store) == []


@pytest.mark.hostile
def test_gc_touches_nothing_that_is_not_the_stores(fake_store):
    for name in ("work/thesis", "trash/photos", "0123/x"):
        (fake_store.root / name).mkdir(parents=True)
    assert collect(fake_store, older_than_days=0, max_bytes=0) == []
    assert (fake_store.root / "work" / "thesis").is_dir()
    assert (fake_store.root / "trash" / "photos").is_dir()


@pytest.mark.hostile
def test_gc_leaves_a_running_build_alone(fake_store):
    key = "0123456789abcdef01234567"
    (fake_store.root / key / "venv").mkdir(parents=True)
    (fake_store.root / "locks").mkdir()
    code = f"""
import sys
from raycrew.venv_manager import Store
with Store({str(fake_store.root)!r}).locks({key!r}).building(10):
    print("held", flush=True)
    sys.stdin.read()
"""
    builder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert builder.stdout.readline() == "held\n"
        assert collect(fake_store) == []
    finally:
        builder.communicate("")
    assert len(collect(fake_store)) == 1


def test_what_was_used_or_built_anew_meanwhile_is_not_removed_for_its_age(fake_store, monkeypatch):
    one, other = (ensure(spec(name), store=fake_store) for name in ("one", "other"))
    forget_use(fake_store)
    for environment in (one, other):
        age(fake_store, environment, 10)
    remove = upkeep._remove

    def asked_for_meanwhile(store, environment, *others):
        ensure(spec("one"), store=store)
        ensure(spec("other"), store=store, force_rebuild=True)
        for built in (one, other):
            store.locks(built.key).release()
        return remove(store, environment, *others)

    monkeypatch.setattr(upkeep, "_remove", asked_for_meanwhile)
    rows = {row.name: row for row in collect(fake_store, older_than_days=5)}
    assert [rows[built.key].reason for built in (one, other)] == ["used meanwhile"] * 2
    assert one.python.exists() and other.python.exists()


def test_a_use_that_nobody_wrote_down_is_long_ago_however_often_gc_looks(fake_store):
    built = ensure(spec("one"), store=fake_store)
    forget_use(fake_store)
    (fake_store.root / "locks" / f"{built.key}.used").unlink()
    for dry_run in (True, True, False):
        (row,) = collect(fake_store, older_than_days=5, dry_run=dry_run)
        assert (row.reason.startswith("unused for"), row.removed) == (True, not dry_run)


def test_names_that_lead_nowhere_go_whatever_they_are(fake_store):
    store, gone = fake_store, "0123456789abcdef01234567"
    store.need_writable(gone)
    store.name("gone", gone)
    store.name("locked-out", gone.replace("0", "f"))
    (store.root / "by-name" / "elsewhere").symlink_to(f"../{'x' * 250}/venv")
    (store.root / "locks" / f"{gone.replace('0', 'f')}.lock").mkdir()  # as one that others alone may open
    assert collect(store) == []
    assert [path.name for path in (store.root / "by-name").iterdir()] == ["locked-out"]


def test_a_name_of_what_is_built_anew_at_the_moment_stays(fake_store, fake_uv):
    built = ensure(spec("one"), store=fake_store)
    fake_store.name("worker", built.key)
    fake_uv.hold("venv")
    builder = threading.Thread(
        target=ensure, args=(spec("one"),), kwargs={"store": fake_store, "force_rebuild": True}
    )
    builder.start()
    try:
        wait_until(lambda: len(fake_uv.calls("venv")) == 2)
        collect(fake_store)
    finally:
        fake_uv.release("venv")
        builder.join()
    assert (fake_store.root / "by-name" / "worker" / "bin" / "python").exists()
