"""Markers are those of the interpreter that is asked for, however it is named; not the driver's."""

import subprocess
import sys
from pathlib import Path

import pytest
from local_sources import value, write_package

from raycrew.venv_manager import EnvironmentSpec, ensure
from raycrew.venv_manager._uv import find_uv
from raycrew.venv_manager.testing import write_project

pytestmark = pytest.mark.hostile


@pytest.fixture
def other(environ):
    """Version and path of another Python than the driver's, which lies beside it and is found by uv."""
    own = f"3.{sys.version_info.minor}"
    for version in ("3.13", "3.12", "3.11"):
        for path in Path(sys.base_prefix).parent.glob(f"*/bin/python{version}"):
            if version != own and subprocess.run([path, "-c", ""], check=False).returncode == 0:
                environ["PATH"] = f"{path.parent}:{environ['PATH']}"
                return version, str(path)
    return pytest.skip("this machine has one Python only")


@pytest.mark.parametrize("form", ["a path", "a version", "a range", "an implementation"])
def test_a_local_source_for_another_python_is_there_and_counts(store, environ, tmp_path, other, form):
    version, path = other
    inner = write_package(tmp_path / "inner", 1)
    sources = '[tool.uv.sources]\ninner = { path = "../inner" }\n'
    needs = [f"inner ; python_version == '{version}'", f"demo==1.0 ; python_version == '{version}'"]
    project = write_project(tmp_path / "project", dependencies=needs, more=sources)
    subprocess.run([find_uv(environ), "lock", "-q", "--project", project], env=environ, check=True)
    forms = {
        "a path": path,
        "a version": version,
        "a range": f"=={version}.*",
        "an implementation": f"cpython-{version}",
    }
    spec = EnvironmentSpec.project(project, python=forms[form], locked=True, carry=False)
    for number in (1, 22):
        (inner / "inner.py").write_text(f"VALUE = {number}\n")
        environment = ensure(spec, store=store)
        assert value(environment, "inner") == number
        assert environment.stamp["packages"] == {"inner": "0", "demo": "1.0"}


def test_what_is_for_the_drivers_python_only_is_not_expected(store, environ, tmp_path, other):
    version, path = other
    write_package(tmp_path / "inner", 1)
    sources = '[tool.uv.sources]\ninner = { path = "../inner" }\n'
    needs = [f"inner ; python_version != '{version}'", f"demo==1.0 ; python_version != '{version}'", "leaf"]
    project = write_project(tmp_path / "project", dependencies=needs, more=sources)
    subprocess.run([find_uv(environ), "lock", "-q", "--project", project], env=environ, check=True)
    spec = EnvironmentSpec.project(project, python=path, locked=True, carry=False)
    assert ensure(spec, store=store).stamp["packages"] == {"leaf": "1.1"}


@pytest.mark.parametrize("case", ["it fits", "it does not fit", "it is elsewhere"])
def test_a_script_may_name_a_local_source_by_a_marker(store, tmp_path, case):
    demo = write_package(tmp_path / "demo", 7)
    if case == "it is elsewhere":
        demo = demo.rename(tmp_path / "nowhere").with_name("demo")
    script = tmp_path / "job.py"
    marker = f"python_version {'>=' if case == 'it fits' else '<'} '3'"
    script.write_text(
        "# /// script\n# dependencies = ['demo']\n# [tool.uv.sources]\n"
        f'# demo = [{{ path = "{demo.name}", marker = "{marker}" }}]\n# ///\n'
    )
    built = ensure(EnvironmentSpec.script(script, carry=False), store=store)
    assert built.stamp["packages"] == {"demo": "0" if case == "it fits" else "2.0"}


def test_a_locked_local_source_by_a_marker_may_be_elsewhere(store, environ, tmp_path):
    inner = write_package(tmp_path / "inner", 1)
    sources = """[tool.uv.sources]\ninner = [{ path = "../inner", marker = "python_version < '3'" }]\n"""
    needs = ["inner ; python_version < '3'", "leaf"]
    project = write_project(tmp_path / "project", dependencies=needs, more=sources)
    write_package(tmp_path / "other", 1)
    entries = [
        f'[[packages]]\nname = "{name}"\n{marker}directory = {{ path = "../{name}" }}\n'
        for name, marker in (("inner", """marker = "python_version < '3'"\n"""), ("other", ""))
    ]
    lock = tmp_path / "project" / "pylock.toml"
    lock.write_text("\n".join(['lock-version = "1.0"\ncreated-by = "hand"\n', *entries]))
    subprocess.run([find_uv(environ), "lock", "-q", "--project", project], env=environ, check=True)
    inner.rename(tmp_path / "nowhere")
    built = ensure(EnvironmentSpec.project(project, frozen=True, carry=False), store=store)
    assert built.stamp["packages"] == {"leaf": "1.1"}
    assert ensure(EnvironmentSpec.pylock(lock, carry=False), store=store).stamp["packages"] == {"other": "0"}


def test_a_script_without_dependencies_has_an_environment_too(store, tmp_path):
    script = tmp_path / "job.py"
    script.write_text("# /// script\n# dependencies = []\n# ///\n")
    assert ensure(EnvironmentSpec.script(script, carry=False), store=store).stamp["packages"] == {}
