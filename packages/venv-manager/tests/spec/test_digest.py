import json
import os

import pytest

from raycrew.venv_manager import EnvironmentSpec, explain, identify
from raycrew.venv_manager._spec.digest import key_of
from raycrew.venv_manager.testing import make_wheel, write_project

pytestmark = pytest.mark.smoke
ENVIRON = {"PIP_CONFIG_FILE": "/dev/null", "HOME": "/nonexistent"}


def keyed(spec, **environ):
    identity = identify(spec, ENVIRON | environ)
    return key_of(identity), identity


@pytest.fixture
def project(tmp_path):
    return write_project(tmp_path / "project", dependencies=["demo"], extras={"a": ["leaf"]})


def test_the_key_is_the_same_each_time_and_fits_a_path(project):
    spec = EnvironmentSpec.project(project)
    assert keyed(spec) == keyed(spec)
    assert keyed(spec)[0].isalnum()
    json.dumps(keyed(spec)[1])


def test_what_decides_the_content_decides_the_key(project, tmp_path):
    spec = EnvironmentSpec.project(project)
    others = [
        keyed(spec.replace(extras=("a",))),
        keyed(spec.replace(python="3.12")),
        keyed(spec.replace(packages=("leaf",))),
        keyed(spec.replace(environment={"CFLAGS": "-O3"})),
        keyed(spec, UV_INDEX="https://i/simple"),
        keyed(spec, UV_FIND_LINKS="/wheels"),
        keyed(spec.replace(carry=False)),
    ]
    assert len({keyed(spec)[0], *(key for key, _ in others)}) == len(others) + 1
    before = keyed(spec)[0]
    (project / "uv.lock").write_text("version = 1\n")
    locked = keyed(spec)[0]
    assert locked != before
    (project / "uv.lock").write_text("version = 2\n")
    assert keyed(spec)[0] != locked


def test_the_version_of_uv_counts_where_uv_chooses_and_the_platform_always(project, tmp_path, monkeypatch):
    def key(version):
        uv = tmp_path / f"uv-{version}"
        uv.write_text(f"#!/bin/sh\necho uv {version}\n")
        uv.chmod(0o755)
        return keyed(EnvironmentSpec.project(project), RAYCREW_UV=str(uv))[0]

    assert key("99.1.0") == key("99.1.5") != key("99.2.0")
    (project / "uv.lock").write_text("version = 1\n")
    locked = key("99.1.0")
    assert locked == key("99.2.0")
    monkeypatch.setattr("raycrew.venv_manager._spec.digest._platform", lambda: "linux-riscv64-glibc-2.40")
    assert key("99.1.0") != locked


def test_what_does_not_decide_the_content_does_not(project, tmp_path):
    spec = EnvironmentSpec.project(project)
    before = keyed(spec, UV_CACHE_DIR="/a", PATH="/x")[0]
    (project / "notes.txt").write_text("not a package, so its folder does not count\n")
    assert keyed(spec, UV_CACHE_DIR="/b", PATH="/y")[0] == before
    project.rename(tmp_path / "moved")
    assert keyed(EnvironmentSpec.project(tmp_path / "moved"))[0] == before


def test_explain_names_each_difference(project):
    spec = EnvironmentSpec.project(project)
    _, one = keyed(spec)
    (project / "pyproject.toml").write_text((project / "pyproject.toml").read_text() + "# changed\n")
    _, other = keyed(spec.replace(python="3.13", extras=("a",)), UV_INDEX="https://i/simple")
    lines = explain(one, other)
    assert [line.split(":")[0] for line in lines] == [
        "files.project", "indexes.UV_INDEX", "interpreter", "spec.extras", "spec.python",
    ]  # fmt: skip
    assert 'spec.extras: absent -> ["a"]' in lines
    assert "-> https://i/simple" in lines[1]
    assert explain(one, one) == []


def test_local_sources_count_file_by_file_but_not_their_litter(tmp_path):
    lib = write_project(tmp_path / "lib", name="lib")
    (lib / "lib.py").write_text("x = 1\n")
    more = '[tool.uv.sources]\nlib = { path = "../lib" }\n'
    spec = EnvironmentSpec.project(write_project(tmp_path / "p", dependencies=["lib"], more=more))
    before = keyed(spec)[0]
    for litter in ("__pycache__/lib.pyc", ".git/HEAD", "build/lib.py", "lib.egg-info/PKG-INFO"):
        (lib / litter).parent.mkdir(exist_ok=True)
        (lib / litter).write_text("litter")
    (lib / ".venv").mkdir()
    (lib / "venv").mkdir()
    (lib / "venv" / "pyvenv.cfg").write_text("")
    assert keyed(spec)[0] == before
    (lib / "lib.py").write_text("x = 2\n")
    assert keyed(spec)[0] != before


def test_sources_count_wherever_they_lie(tmp_path):
    """In folders that are named as build output is, and behind links, even if those lead back."""
    lib = write_project(tmp_path / "lib", name="lib")
    spec = EnvironmentSpec.requirements([f"lib @ {lib.as_uri()}"])
    (lib / "lib" / "build").mkdir(parents=True)
    (lib / "dist").mkdir()
    (lib / "dist" / "__init__.py").write_text("")
    (tmp_path / "shared").mkdir()
    (lib / "linked").symlink_to(tmp_path / "shared")
    (lib / "loop").symlink_to(lib)
    keys = [keyed(spec)[0]]
    for file in (lib / "lib" / "build" / "steps.py", lib / "dist" / "x.py", tmp_path / "shared" / "x.py"):
        file.write_text("")
        keys.append(keyed(spec)[0])
    assert len(set(keys)) == 4


def test_a_wheelhouse_counts_by_what_its_files_hold(tmp_path):
    house = tmp_path / "wheels"
    house.mkdir()
    spec = EnvironmentSpec.requirements(["one"], wheelhouse=str(house))

    def put(name, content):
        fresh = tmp_path / "fresh"
        fresh.write_bytes(content)
        os.utime(fresh, (1, 1))
        fresh.replace(house / name)
        return keyed(spec)[0]

    wheels = [make_wheel("one", "1.0", files={"one.py": f"VALUE = {n}\n"}) for n in (1, 2, 1)]
    assert len({len(content) for _, content in wheels}) == 1
    one, other, again = (put(*wheel) for wheel in wheels)
    assert one == again != other
    source = put("two-1.0.tar.gz", b"not a zip file")
    assert source not in (one, put("two-1.0.tar.gz", b"another one.."))
    put("notes.txt", b"not for uv")
    (house / "two-1.0.tar.gz").unlink()
    assert keyed(spec)[0] == one
    _, with_it = keyed(spec)
    (house / wheels[0][0]).unlink()
    (line,) = explain(keyed(spec)[1], with_it)
    assert line.startswith("sources.wheelhouse.one-1.0-py3-none-any.whl: absent -> ")


def test_requirements_with_local_folders_count_them(tmp_path):
    lib = write_project(tmp_path / "lib", name="lib")
    spec = EnvironmentSpec.requirements([f"lib @ {lib.as_uri()}", "demo"])
    before = keyed(spec)[0]
    (lib / "new.py").write_text("")
    assert keyed(spec)[0] != before


def test_a_password_is_neither_counted_nor_kept():
    spec = EnvironmentSpec.requirements(["demo"])
    one = keyed(spec, UV_INDEX="https://me:old@i/simple https://j/simple")
    other = keyed(spec, UV_INDEX="https://me:new@i/simple https://j/simple")
    assert one == other
    assert one[1]["indexes"]["UV_INDEX"] == "https://i/simple https://j/simple"
