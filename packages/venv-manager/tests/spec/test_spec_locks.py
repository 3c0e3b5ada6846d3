"""Lock files: their entries, and what they come to."""

import sys
from pathlib import Path

import pytest
from packaging.markers import default_environment

from raycrew.venv_manager._spec import locks, markers_of
from raycrew.venv_manager.errors import SpecError

LOCK = """lock-version = "1.0"

[[packages]]
name = "Demo_One"
version = "1.0"
marker = "python_version < '3.12'"
sdist = { url = "https://h/d.tar.gz", hashes = { sha256 = "z" } }
wheels = [{ url = "https://h/d.whl", hashes = { sha256 = "b" } }, { path = "wheels/x.whl", hashes = { sha256 = "x" } }]

[[packages]]
name = "folder"
directory = { path = "../folder", subdirectory = "inner" }

[[packages]]
name = "file"
archive = { path = "file.zip", hashes = { sha256 = "never" } }

[[packages]]
name = "git"
vcs = { commit-id = "abc" }
"""  # noqa: E501 - a lock has such lines


def test_entries_of_a_lock():
    demo, folder, file, git = locks.read_lock(LOCK)
    assert (demo.name, demo.pin) == ("demo-one", "demo-one==1.0 ; python_version < '3.12'")
    assert (folder.pin, folder.local_path, file.local_path) == (None, "../folder/inner", "file.zip")
    assert demo.local_path is git.local_path is None
    assert demo.applies(lambda: {"python_version": "3.11"})
    assert not demo.applies(lambda: {"python_version": "3.12"})
    assert git.applies(lambda: 1 / 0)  # without a marker nobody is asked
    assert locks.Package({"name": "a", "version": "1"}, "").pin == "a==1"
    assert demo.text.startswith("[[packages]]\nname") and demo.text.endswith("]\n")


def test_what_a_lock_comes_to_has_no_places_and_no_file_that_is_built_here():
    assert locks.locked_versions(LOCK) == [
        ("demo-one", "1.0", ("b", "z")),
        ("file", None, ()),
        ("folder", None, ()),
        ("git", None, ("abc",)),
    ]


def test_a_lock_that_is_written_is_read_again_in_the_order_of_names():
    written = locks.write_lock(locks.read_lock(LOCK))
    assert [one.name for one in locks.read_lock(written)] == ["demo-one", "file", "folder", "git"]
    assert locks.locked_versions(written) == locks.locked_versions(LOCK)


def test_a_wheel_beside_the_lock():
    entry = locks.wheel_entry("Demo_One-1.2-py3-none-any.whl", b"content")
    assert (entry.name, entry.pin) == ("demo-one", "demo-one==1.2")
    (wheel,) = locks.read_lock(entry.text)[0].data["wheels"]
    assert wheel["path"] == "wheels/Demo_One-1.2-py3-none-any.whl" and len(wheel["hashes"]["sha256"]) == 64


def test_versions_that_are_preferred():
    found = locks.read_lock(locks.preferred_versions({"a": "1", "b": "2"}))
    assert [one.pin for one in found] == ["a==1", "b==2"]


def test_the_markers_of_an_interpreter_are_what_it_says():
    assert markers_of(Path(sys.executable)) == default_environment()


@pytest.mark.parametrize(("source", "local"), [("directory", True), ("editable", True), ("registry", False)])
def test_local_sources_in_a_lock_of_uv(tmp_path, source, local):
    lock = tmp_path / "uv.lock"
    lock.write_text(f'[[package]]\nname = "a"\nsource = {{ {source} = "x" }}\n')
    assert locks.names_local_sources(lock) is local


@pytest.mark.parametrize("text", ["[[packages]]\nname = ", 'packages = [{ name = "a" }]\n'])
def test_what_is_no_lock_is_refused(tmp_path, text):
    (tmp_path / "pylock.toml").write_text(text)
    with pytest.raises(SpecError, match=r"pylock.toml is no lock file"):
        locks.read_lock_file(tmp_path / "pylock.toml")
    with pytest.raises(SpecError, match="no lock file that can be read"):
        locks.read_lock_file(tmp_path / "absent.toml")
