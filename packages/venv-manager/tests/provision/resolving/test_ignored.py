"""What git ignores of a source: whether it is still what it was."""

import os
import subprocess

import pytest

from raycrew.venv_manager.provision._resolving.ignored import Ignored


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    (folder / "made").mkdir(parents=True)
    (folder / ".gitignore").write_text("made/\none.dat\n")
    for name in ("made/a.py", "made/b.py", "one.dat"):
        (folder / name).write_text(name)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


def written_again(path):
    """The same content at another moment."""
    text = path.read_text()
    path.unlink()
    path.write_text(text)
    os.utime(path, ns=(1, 1))


def test_files_stay_while_nothing_of_them_changes(source):
    seen = Ignored.seen(source, frozenset())
    assert sorted(seen.names) == ["made/", "one.dat"] and seen.stays(seen.names, [])
    (source / "made/a.py").write_text("other")
    assert not seen.stays(["made/"], []) and seen.stays(["one.dat"], [])
    assert seen.stays(["made/"], ["made/a.py"]), "what came into the wheel as it is is looked at elsewhere"
    assert not seen.stays(["made/"], ["made/b.py"])


def test_files_that_came_or_went_are_seen(source):
    seen = Ignored.seen(source, frozenset())
    (source / "made/c.py").write_text("new")
    assert not seen.stays(["made/"], []) and seen.stays(["one.dat"], [])
    (source / "made/c.py").unlink()
    assert seen.stays(["made/"], [])
    (source / "made/b.py").unlink()
    assert not seen.stays(["made/"], []) and seen.stays(["one.dat"], [])
    (source / "one.dat").unlink()
    assert not seen.stays(["one.dat"], [])


@pytest.mark.parametrize(("counted", "stays"), [(frozenset(), False), (frozenset({"made/"}), True)])
def test_what_is_counted_is_told_by_its_content(source, counted, stays):
    seen = Ignored.seen(source, counted)
    written_again(source / "made/a.py")
    assert seen.stays(["made/"], []) is stays
    written_again(source / "one.dat")
    assert seen.stays(["one.dat"], []), "a file by itself always is"
    (source / "one.dat").write_text("other")
    assert not seen.stays(["one.dat"], [])


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (["one.dat"], {"one.dat"}),
        (["made/b.py"], {"made/"}),
        (["made/*.py", "one.dat"], {"made/", "one.dat"}),
        (["one.data", "made.txt", "absent"], set()),
        ([], set()),
    ],
)
def test_what_a_source_names_is_named_and_not_what_only_begins_like_it(source, keys, named):
    for name in ("one.data", "made.txt"):
        (source / name).write_text(name)
    (source / "pyproject.toml").write_text(f"[tool.uv]\ncache-keys = {keys}\n")
    assert Ignored(source).named == named


def test_folders_that_hold_nothing_yet_and_what_is_no_folder(source, tmp_path):
    (source / ".gitignore").write_text("made/\none.dat\nempty/\n")
    (source / "empty").mkdir()
    assert "empty/" not in Ignored(source).names
    assert Ignored(tmp_path / "absent").names == []
    assert Ignored(source / "one.dat").names == []


def test_a_fingerprint_is_of_what_names_hold_wherever_the_folder_lies(source):
    def found(*names):
        return Ignored(source).fingerprint(names)

    first = found("made/", "one.dat")
    assert found("one.dat", "made/") == first and len({first, found("made/"), found("one.dat"), found()}) == 4
    (source / "made/a.py").write_text("other")
    assert found("made/", "one.dat") != first
    (source / "made/a.py").write_text("made/a.py")
    moved = source.rename(source.with_name("moved"))
    assert Ignored(moved).fingerprint(["made/", "one.dat"]) == first
