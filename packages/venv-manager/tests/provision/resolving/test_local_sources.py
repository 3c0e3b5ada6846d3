"""Local sources count by what they are built to, and are built again only if that could have changed."""

import os
import subprocess

import pytest

from raycrew.venv_manager import EnvironmentSpec, Store, VenvError, ensure
from raycrew.venv_manager._uv import find_uv
from raycrew.venv_manager.provision import prepare
from raycrew.venv_manager.testing import write_project

# As other backends, it writes the moment and its own version into a wheel; it ships all of `src`.
BACKEND = """
import os, pathlib, tarfile, time, zipfile
def members():
    return sorted(p for p in pathlib.Path("src").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "lib-0-py3-none-any.whl"
    moment = time.localtime(1e9 + time.time_ns() % 10**9)[:6]
    with zipfile.ZipFile(pathlib.Path(folder, name), "w") as wheel:
        def add(path, content):
            wheel.writestr(zipfile.ZipInfo(str(path), moment), content)
        for path in members():
            add(path.relative_to("src"), path.read_bytes())
        if pathlib.Path("lib.c").exists():
            add("lib/_c.so", pathlib.Path("lib.c").read_bytes() + os.urandom(8))
        info = "lib-0.dist-info/"
        add(info + "METADATA", "Metadata-Version: 2.1\\nName: lib\\nVersion: 0\\nRequires-Dist: moving\\n")
        tags = "Root-Is-Purelib: true\\nTag: py3-none-any\\n"
        add(info + "WHEEL", f"Wheel-Version: 1.0\\nGenerator: own {time.time_ns()}\\n{tags}")
        add(info + "RECORD", f"x,{time.time_ns()},\\n")
    return name
def build_sdist(folder, config_settings=None):
    if pathlib.Path("no-sdist").exists():
        raise SystemExit("no source archives")
    with tarfile.open(pathlib.Path(folder, "lib-0.tar.gz"), "w:gz") as archive:
        for path in ["pyproject.toml", "backend.py", *members(), *pathlib.Path().glob("*.c")]:
            archive.add(path, f"lib-0/{path}")
    return "lib-0.tar.gz"
"""


@pytest.fixture
def lib(tmp_path):
    """A source with a package, whose project file says what it needs."""
    folder = write_project(
        tmp_path / "lib", name="lib", dependencies=["moving"],
        more='[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    )  # fmt: skip
    (folder / "src" / "lib").mkdir(parents=True)
    (folder / "src" / "lib" / "__init__.py").write_text("VALUE = 1\n")
    (folder / "backend.py").write_text(BACKEND)
    return folder


def built_by(lib, index, name, code):
    """The source, built by a backend of the index, so that no code of its own takes part."""
    index.add(name, "1.0", files={f"{name}.py": code.replace('"backend.py", ', "")})
    project, own = lib / "pyproject.toml", 'requires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    text = project.read_text()
    project.write_text(text.replace(own, f'requires = ["{name}"]\nbuild-backend = "{name}"\n'))
    (lib / "backend.py").unlink()
    return lib


@pytest.fixture
def plain(lib, index):
    """The same source, built by a backend that is not its own."""
    return built_by(lib, index, "plainbackend", BACKEND)


@pytest.fixture
def checkout(lib):
    """The same source as a git checkout that ignores logs and what is generated."""
    (lib / ".gitignore").write_text("logs/\n_generated.py\ndata/\n")
    subprocess.run(["git", "init", "-q", lib], check=True)
    subprocess.run(["git", "-C", lib, "add", "."], check=True)
    return lib


class Asked:
    """A store, and what its uv was asked for."""

    def __init__(self, folder, environ):
        self.log = folder / "asked"
        uv = folder / "uv"
        uv.write_text(f'#!/bin/sh\necho "$1 $2" >>{self.log}\nexec {find_uv(environ)} "$@"\n')
        uv.chmod(0o755)
        self.store = Store(folder / "store", environ=environ | {"RAYCREW_UV": str(uv)})

    def key(self, spec):
        return prepare(spec, self.store).key

    def since(self):
        """Commands of uv since the last question."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.write_text("")
        return [line.replace(" -q", "") for line in lines if "--version" not in line]


@pytest.fixture
def asked(tmp_path, environ, index):
    index.add("moving", "1.0")
    return Asked(tmp_path, environ)


def of(path, **options):
    return EnvironmentSpec.requirements([f"lib @ {path.as_uri()}"], carry=False, **options)


def run(environment, code):
    return subprocess.check_output([environment.python, "-c", code], text=True).strip()


@pytest.mark.hostile
def test_two_builds_of_one_source_are_one_environment(asked, lib, tmp_path, environ):
    first = asked.key(of(lib))
    assert asked.since() == ["pip compile", "build --wheel"]
    assert asked.key(of(lib)) == first
    assert asked.since() == []
    (tmp_path / "other").mkdir()
    assert Asked(tmp_path / "other", environ).key(of(lib)) == first
    moved = lib.rename(tmp_path / "moved")
    assert asked.key(of(moved)) == first
    assert asked.since() == []


@pytest.mark.hostile
def test_outside_of_git_what_is_not_shipped_costs_nothing_once_it_was_seen(asked, plain):
    lib, twice = plain, ["build --wheel", "build --sdist"]
    built, package = ensure(of(lib), store=asked.store), lib / "src" / "lib"
    asked.since()

    def asks_for(change):
        change()
        assert ensure(of(lib), store=asked.store) == built
        return asked.since()

    (lib / "logs").mkdir()
    assert asks_for(lambda: (lib / "logs" / "0.txt").write_text("a line\n")) == twice
    assert asks_for(lambda: (lib / "logs" / "0.txt").write_text("two\n")) == []
    assert asks_for(lambda: (lib / "logs" / "1.txt").write_text("more\n")) == []
    (lib / "docs").mkdir()
    assert asks_for(lambda: (lib / "docs" / "conf.py").touch()) == twice
    assert asks_for(lambda: (lib / "docs" / "conf.py").write_text("# of nobody's concern\n")) == []
    assert asks_for(lambda: (lib / "docs" / "conf.py").unlink()) == []
    for text in ("beside the project file", "all may be read"):
        assert asks_for(lambda text=text: (lib / "VERSION").write_text(text)) == twice
    for number, (name, text) in enumerate(
        [("new.py", "VALUE = 1"), (".hidden", "1"), ("new.py", "VALUE = 2"), ("__init__.py", "VALUE = 3")]
    ):
        (package / name).write_text(text)
        (lib / "logs" / f"{number}.log").touch()
        found = ensure(of(lib), store=asked.store)
        assert found.key != built.key and "build --wheel" in asked.since(), name
        assert (
            run(found, f"import lib, pathlib; print(pathlib.Path(lib.__path__[0], '{name}').read_text())")
            == text
        )
        built = found
    before = (package / "new.py").stat()
    (package / "new.py").write_text("VALUE = 9")
    os.utime(package / "new.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = ensure(of(lib), store=asked.store)
    assert changed.key != built.key, "an edit that keeps size and time"
    (package / "new.py").unlink()
    assert ensure(of(lib), store=asked.store).key not in (changed.key, built.key)


@pytest.mark.hostile
def test_without_source_archives_all_files_outside_of_git_count(asked, plain):
    lib = plain
    (lib / "no-sdist").touch()
    (lib / "docs").mkdir()
    first = asked.key(of(lib))
    for number in range(3):
        asked.since()
        (lib / "docs" / "notes.txt").write_text(str(number))
        assert asked.key(of(lib)) == first
        assert "build --wheel" in asked.since()


@pytest.mark.hostile
def test_a_package_that_appears_where_nothing_was_shipped_from_is_seen(asked, lib, index):
    modules = BACKEND.replace("p.is_file() and", 'p.suffix == ".py" and')
    built_by(lib, index, "modulesbackend", modules)
    extra = lib / "src" / "extra"
    extra.mkdir()
    for text in ("1", "2", "3"):
        (extra / "notes.txt").write_text(text)
        first = asked.key(of(lib))
    assert asked.since()[-2:] == ["build --wheel", "build --sdist"], "the third costs nothing"
    (extra / "__init__.py").touch()
    (extra / "more.py").write_text("VALUE = 5\n")
    found = ensure(of(lib), store=asked.store)
    assert found.key != first and run(found, "import extra.more; print(extra.more.VALUE)") == "5"


@pytest.mark.hostile
@pytest.mark.parametrize("by", ["a backend", "setup.py", "a hook"])
def test_what_code_of_a_source_reads_to_build_it_counts_wherever_it_lies(asked, lib, index, by):
    value = '"VALUE = " + pathlib.Path("data/value.txt").read_text()'
    reads = BACKEND.replace(
        '        info = "lib-0', f'        add("lib/_value.py", {value})\n        info = "lib-0'
    )
    if by == "a backend":
        (lib / "backend.py").write_text(reads)
    else:
        built_by(lib, index, "readsbackend", reads)
    if by == "setup.py":
        (lib / "setup.py").touch()
    if by == "a hook":
        project = lib / "pyproject.toml"
        project.write_text(project.read_text() + "[tool.hatch.build.targets.wheel.hooks.custom]\n")
    (lib / "data").mkdir()
    for text in "1231":
        (lib / "data" / "value.txt").write_text(text)
        assert run(ensure(of(lib), store=asked.store), "import lib._value; print(lib._value.VALUE)") == text


@pytest.mark.hostile
def test_an_edit_is_another_environment_with_the_same_other_packages(asked, lib, index):
    first = ensure(of(lib), store=asked.store)
    index.add("moving", "2.0")
    asked.since()
    (lib / "src" / "lib" / "__init__.py").write_text("VALUE = 2\n")
    second = ensure(of(lib), store=asked.store)
    assert [words for words in asked.since() if words != "pip install"][:1] == ["build --wheel"]
    assert second.key != first.key
    assert run(second, "import lib; print(lib.VALUE)") == "2"
    assert second.stamp["packages"] == {"lib": "0", "moving": "1.0"}
    (lib / "src" / "lib" / "__init__.py").write_text("VALUE = 1\n")
    assert ensure(of(lib), store=asked.store) == first


@pytest.mark.hostile
@pytest.mark.parametrize("name", ["src/lib/_generated.py", "src/lib/data/one.json", "src/data/top.json"])
def test_what_git_ignores_counts_where_it_is_shipped(asked, checkout, name):
    keys, file = [asked.key(of(checkout))], checkout / name
    file.parent.mkdir(exist_ok=True)
    for text in ("1", "2", "2", "3"):
        file.write_text(text)
        keys.append(asked.key(of(checkout)))
    file.unlink()
    keys.append(asked.key(of(checkout)))
    assert keys[0] == keys[5]
    assert keys[2] == keys[3]
    assert len({*keys}) == 4


@pytest.mark.hostile
def test_what_git_ignores_costs_nothing_where_it_is_not_shipped(asked, checkout):
    first = asked.key(of(checkout))
    asked.since()
    (checkout / "logs").mkdir()
    for number in range(3):
        (checkout / "logs" / f"{number}.txt").write_text("a line\n")
        assert asked.key(of(checkout)) == first
    assert asked.since() == ["build --wheel"]  # to see whether what is new comes into it
    (checkout / "logs" / "deeper").mkdir()
    (checkout / "logs" / "deeper" / "1.txt").write_text("more\n")
    assert asked.key(of(checkout)) == first
    assert asked.since() == []


@pytest.mark.hostile
def test_what_is_compiled_counts_by_what_it_is_compiled_from(asked, lib, tmp_path, environ):
    (lib / "lib.c").write_text("int x;")
    first = asked.key(of(lib))
    (tmp_path / "other").mkdir()
    other = Asked(tmp_path / "other", environ)
    assert other.key(of(lib)) == first
    assert "build --sdist" in other.since()
    (lib / "lib.c").write_text("int y;")
    assert asked.key(of(lib)) != first
    (lib / "no-sdist").write_text("")
    without = asked.key(of(lib))
    assert without == asked.key(of(lib)) != first


@pytest.mark.hostile
@pytest.mark.parametrize("header", ["data/lib.h", "_generated.py", "include/lib.h"])
def test_what_a_compiler_reads_counts(asked, checkout, header):
    """All headers; what git ignores as well, in a folder only if the source names it in its `cache-keys`."""
    project, backend, file = checkout / "pyproject.toml", checkout / "backend.py", checkout / header
    project.write_text(f'{project.read_text()}[tool.uv]\ncache-keys = [{{ file = "data/*.h" }}]\n')
    compiles = f'pathlib.Path("{header}").read_bytes() + pathlib.Path("lib.c")'
    backend.write_text(BACKEND.replace('"lib/_c.so", pathlib.Path("lib.c")', f'"lib/_c.so", {compiles}'))
    (checkout / "lib.c").write_text("int x;")
    file.parent.mkdir(exist_ok=True)
    built = []
    for text in ("1", "2", "1"):
        file.write_text(text)
        built.append(ensure(of(checkout), store=asked.store))
        compiled = (
            "import lib, pathlib; print(pathlib.Path(lib.__path__[0], '_c.so').read_bytes()[:1].decode())"
        )
        assert run(built[-1], compiled) == text
    assert built[0] == built[2]


@pytest.mark.hostile
def test_a_source_that_changes_while_it_is_built_is_built_again(asked, lib):
    grows = "open('src/lib/grown.py', 'a').write('#')\n"
    (lib / "backend.py").write_text(BACKEND.replace("name = ", f"{grows}    name = ", 1))
    with pytest.raises(VenvError, match=r"the files of .*lib changed each time while it was built"):
        asked.key(of(lib))
    once = f"import os\n    if not os.path.exists('src/lib/grown.py'): {grows}"
    (lib / "backend.py").write_text(BACKEND.replace("name = ", f"{once}    name = ", 1))
    (lib / "src" / "lib" / "grown.py").unlink()
    built = ensure(of(lib), store=asked.store)
    assert run(built, "import lib.grown") == ""
    assert ensure(of(lib), store=asked.store) == built


def test_a_damaged_record_of_a_source_is_made_again(asked, lib):
    first = asked.key(of(lib))
    for file in (asked.store.root / "sources").glob("*.json"):
        for torn in ("", "[]", "{}", '{"shipped": 5}', '{"wheel": 1'):
            file.write_text(torn)
            assert asked.key(of(lib)) == first, torn
    for wheel in (asked.store.root / "sources").glob("*/*.whl"):
        wheel.unlink()
    assert ensure(of(lib), store=asked.store).key == first


def test_a_locked_project_counts_its_sources_and_needs_uv_once(asked, lib, tmp_path, environ):
    project = write_project(
        tmp_path / "p", dependencies=["lib"], more='[tool.uv.sources]\nlib = { path = "../lib" }\n'
    )
    subprocess.run([find_uv(environ), "lock", "-q", "--project", project], env=environ, check=True)
    spec = EnvironmentSpec.project(project, locked=True, carry=False)
    first = ensure(spec, store=asked.store)
    asked.since()
    assert ensure(spec, store=asked.store) == first
    assert asked.since() == []
    (lib / "src" / "lib" / "__init__.py").write_text("VALUE = 2\n")
    assert run(ensure(spec, store=asked.store), "import lib; print(lib.VALUE)") == "2"


HATCHLING = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "hatched"
version = "0"
[tool.hatch.build.targets.wheel]
packages = ["hatched"]
"""


@pytest.mark.hostile
def test_two_builds_by_hatchling_are_one_environment(asked, tmp_path, environ):
    pytest.importorskip("hatchling")
    folder = tmp_path / "hatched"
    (folder / "hatched").mkdir(parents=True)
    (folder / "hatched" / "__init__.py").write_text("")
    (folder / "pyproject.toml").write_text(HATCHLING)
    spec = EnvironmentSpec.requirements([f"hatched @ {folder.as_uri()}"], carry=False)
    (tmp_path / "other").mkdir()
    assert asked.key(spec) == Asked(tmp_path / "other", environ).key(spec)
