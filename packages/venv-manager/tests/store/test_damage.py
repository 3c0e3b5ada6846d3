"""Damaged stamps, stores that were moved, and homes that are of no use: healed, or a clear word."""

import json
import subprocess
import sys

import pytest
from test_store import read_only
from test_upkeep import forget_use

from raycrew.venv_manager import (
    EnvironmentSpec,
    ReadOnlyStoreError,
    SpecError,
    Store,
    collect,
    ensure,
    verify,
)
from raycrew.venv_manager.__main__ import main

pytestmark = pytest.mark.hostile
SPEC = EnvironmentSpec.requirements(["fake"], carry=False)
DAMAGED = [
    "[]",
    "null",
    "5",
    '"text"',
    "{}",
    '{"key": 1}',
    '{"created": "x"',
    "",
    "\0",
    b"\xff\xfe",
    "[" * 100_000,
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_stamp_is_no_environment_and_the_next_caller_heals_it(fake_store, content, capsys):
    built = ensure(SPEC, store=fake_store)
    other = ensure(EnvironmentSpec.requirements(["other"], carry=False), store=fake_store)
    stamp = built.path / "stamp.json"
    stamp.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert fake_store.get(built.key) is None
    assert fake_store.environments() == [other]
    for words in (["list"], ["gc", "--dry-run"], ["verify"]):
        assert main([*words, "--store", str(fake_store.root)]) == 0
    assert "its stamp is damaged" not in capsys.readouterr().err
    healed = ensure(SPEC, store=fake_store)
    assert healed.stamp["packages"] == {"fake": "1"}
    assert set(fake_store.environments()[0].stamp) == set(built.stamp)


def test_each_part_of_a_stamp_is_needed(fake_store):
    built = ensure(SPEC, store=fake_store)
    whole = json.loads((built.path / "stamp.json").read_text())
    for part in ("created", "spec", "label", "identity", "expectation", "python", "packages", "own_bytes"):
        (built.path / "stamp.json").write_text(json.dumps(whole | {part: None}))
        assert fake_store.look(built.key) is None, part
    (built.path / "stamp.json").write_text(json.dumps(whole))
    assert fake_store.look(built.key) == built


def test_gc_takes_a_damaged_one_away_unless_it_is_used(fake_store):
    built = ensure(SPEC, store=fake_store)
    (built.path / "stamp.json").write_text("[]")
    (row,) = collect(fake_store)
    assert (row.removed, row.reason) == (False, "in use by a process that asked for it")
    fake_store.locks(built.key).release()
    (row,) = collect(fake_store)
    assert (row.removed, row.reason) == (True, "its stamp is damaged")
    assert not built.path.exists()


def test_a_damaged_recipe_is_made_again(fake_store, fake_uv):
    built = ensure(SPEC, store=fake_store)
    (recipe,) = (fake_store.root / "recipes").iterdir()
    content = recipe.read_bytes()
    for torn in (content[:50], content.replace(b'"expectation"', b'"expectatioN"'), b"", b"[]"):
        recipe.write_bytes(torn)
        assert fake_store.recipe(built.key) is None


def test_a_store_that_was_moved_builds_anew_with_the_versions_it_had(fake_store, fake_uv, tmp_path):
    built = ensure(SPEC, store=fake_store)
    forget_use(fake_store)
    fake_store.root.rename(tmp_path / "moved")
    moved = Store(tmp_path / "moved", environ=fake_store.environ)
    drift = verify(moved, moved.look(built.key))
    assert not drift.ok
    assert drift.notes == (f"it was moved from {built.path}: programs in its bin folder do not start",)
    again = ensure(SPEC, store=moved)
    assert again.stamp["path"] == str(tmp_path / "moved" / built.key)
    assert verify(moved, again).ok
    assert (len(fake_uv.calls("pip compile")), len(fake_uv.calls("venv"))) == (1, 2)
    assert ensure(SPEC, store=moved) == again


def test_a_store_by_another_name_was_not_moved(fake_store, fake_uv, tmp_path):
    built = ensure(SPEC, store=fake_store)
    (tmp_path / "name").symlink_to(fake_store.root)
    named = Store(tmp_path / "name", environ=fake_store.environ)
    assert ensure(SPEC, store=named).stamp == built.stamp
    assert len(fake_uv.calls("venv")) == 1


def test_a_moved_store_that_cannot_be_written_to_says_so(fake_store, tmp_path, capfd):
    ensure(SPEC, store=fake_store)
    fake_store.root.rename(tmp_path / "moved")
    code = """
        from raycrew.venv_manager import EnvironmentSpec, ensure
        print(ensure(EnvironmentSpec.requirements(["fake"], carry=False)).python)
    """
    environ = fake_store.environ | {"RAYCREW_VENV_DIR": str(tmp_path / "moved")}
    assert str(tmp_path / "moved") in read_only(tmp_path / "moved", code, environ)
    assert "programs in its bin folder do not start" in capfd.readouterr().err


def test_a_home_that_is_of_no_use(fake_store, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    plain = {k: v for k, v in fake_store.environ.items() if k not in ("XDG_CACHE_HOME", "RAYCREW_VENV_DIR")}
    with pytest.raises(ReadOnlyStoreError, match=r"cannot be made.*RAYCREW_VENV_DIR names another folder"):
        ensure(SPEC, store=Store(environ=plain | {"HOME": str(tmp_path / "file")}))
    with pytest.raises(SpecError, match=r"there is no store ~no-such-user/x.*RAYCREW_VENV_DIR"):
        Store("~no-such-user/x")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda _uid: {}["nobody"])
    with pytest.raises(SpecError, match=r"there is no store ~/\.cache/raycrew/venvs"):
        Store(environ={})


def test_a_closed_pipe_ends_a_command_quietly(fake_store):
    for name in ("one", "two"):
        ensure(EnvironmentSpec.requirements([name], carry=False), store=fake_store)
    for flags in (["--json"], []):
        words = [sys.executable, "-m", "raycrew.venv_manager", "list", *flags, "--store", fake_store.root]
        process = subprocess.Popen(
            words, env=fake_store.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 1)
        process.stderr.close()
