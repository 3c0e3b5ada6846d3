"""What a wheel and a source archive hold, told apart from when and how they were made."""

import io
import tarfile
import zipfile

import pytest

from raycrew.venv_manager._spec.local import file_hash
from raycrew.venv_manager._store.building import content

WHEEL = "Wheel-Version: 1.0\nGenerator: some 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
INFO = "demo-1.dist-info"


def wheel(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def sdist(path, files):
    with tarfile.open(path, "w:gz") as archive:
        folder = tarfile.TarInfo("demo-1/src")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def test_a_wheel_is_its_files_and_its_tags():
    files = {"demo/": "", "demo/__init__.py": "A = 1\n", f"{INFO}/METADATA": "Name: demo\n"}
    told = files | {f"{INFO}/WHEEL": WHEEL, f"{INFO}/RECORD": "demo/__init__.py,sha256=x,6\n"}
    found = content.members(wheel(told))
    assert sorted(found) == ["demo-1.dist-info/METADATA", "demo-1.dist-info/WHEEL", "demo/__init__.py"]
    again = told | {f"{INFO}/WHEEL": WHEEL.replace("some 1.0", "other 2"), f"{INFO}/RECORD": ""}
    assert content.members(wheel(again)) == found, "neither who made it nor its RECORD counts"
    for name, text in (("demo/__init__.py", "A = 2\n"), (f"{INFO}/WHEEL", WHEEL + "Tag: cp311-none-any\n")):
        assert content.members(wheel(told | {name: text})) != found


def test_a_source_archive_is_its_files_without_the_folder_around_them(tmp_path):
    files = {"demo-1/src/a.c": "int a;", "demo-1/demo.egg-info/SOURCES.txt": "src/a.c"}
    found = content.members_of_source(sdist(tmp_path / "demo-1.tar.gz", files))
    assert list(found) == ["src/a.c"]
    other = content.members_of_source(sdist(tmp_path / "other.tar.gz", files | {"demo-1/src/a.c": "int b;"}))
    assert other.keys() == found.keys() and other != found


def test_the_digest_is_of_names_and_contents_in_any_order():
    assert content.digest({"a": "1", "b": "2"}) == content.digest({"b": "2", "a": "1"})
    assert len({content.digest(one) for one in ({"a": "1"}, {"b": "1"}, {"a": "2"}, {"a1": ""}, {})}) == 5


@pytest.mark.parametrize("name", ["demo/fast.cpython-311-x86_64-linux-gnu.so", "a.pyd", "lib/b.dylib"])
def test_what_a_compiler_made(name):
    assert content.is_compiled(["demo/__init__.py", name])
    assert not content.is_compiled(["demo/__init__.py", f"{name}.txt"])


def test_what_a_compiler_reads_beside_what_is_told(tmp_path):
    for name in ("told.c", "inner/seen.h", "README.md", "setup.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = content.read_by_compilers(str(tmp_path), ["told.c"])
    assert found == {f"beside {name}": file_hash(tmp_path / name) for name in ("inner/seen.h", "setup.py")}


def test_the_folders_of_a_source_whose_files_come_into_a_wheel():
    counted = [
        "pyproject.toml",
        "src/demo/__init__.py",
        "tests/test_demo.py",
        "src/demo/data/x",
        "docs/index.md",
    ]
    held = ["demo/__init__.py", "demo/data/x", "index.md", "pyproject.toml"]
    assert content.tops_of(counted, held) == {"src/demo", "src/demo/data", "docs"}
    assert content.tops_of(["a/b"], [""]) == set() and content.tops_of(["a/b"], ["a/b"]) == {"a"}


def test_what_git_ignores_and_a_wheel_holds(tmp_path):
    for name, text in {
        "gen/made.py": "MADE = 1\n",
        "logs/run.log": "a\n",
        "empty.py": "",
        "v.py": "V = 1\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    held = content.members(
        wheel({"demo/made.py": "MADE = 1\n", "v.py": "V = 2\n", "demo/n.py": "", "demo/o.py": "o"})
    )
    folder = str(tmp_path)
    assert content.came_of(folder, ["gen/", "logs/", "empty.py", "v.py"], held) == {
        "gen/made.py": held["demo/made.py"]
    }, "by what they hold; what is empty says nothing"
    names = ["gen/", "logs/", "empty.py", "v.py", "src/demo/o.py", "src/demo/new/", "lib/o.py"]
    assert content.shipped(folder, names, held, {"src/demo"}) == {
        "gen/",
        "v.py",
        "src/demo/o.py",
        "src/demo/new/",
    }
    assert content.shipped(folder, ["src/demonic/", "src/demo"], held, {"src/demo"}) == set()
