"""Equal wheels count alike in the key of an environment, however and whenever they were installed."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from raycrew.venv_manager._uv import find_uv
from raycrew.venv_manager.testing import make_wheel

pytestmark = pytest.mark.hostile

FILES = {"raycrew/alpha/__init__.py": "VALUE = 1\n", "raycrew/alpha/.hidden": "x\n"}


@pytest.fixture
def wheel(tmp_path):
    name, content = make_wheel("raycrew-alpha", "0.1", files=FILES)
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


@pytest.fixture
def fresh(tmp_path, environ):
    """Make a virtual environment with flags of `venv`; gives what installs wheels in it, and its Python."""

    def make(name, *flags):
        subprocess.run([sys.executable, "-m", "venv", *flags, tmp_path / name], check=True)
        python = tmp_path / name / "bin" / "python"

        def install(tool, *words):
            by_uv = [find_uv(environ), "pip", "install", "--python", python]
            by_pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            flags = ["--no-index", "--no-deps", *words]
            subprocess.run(
                [*(by_uv if tool == "uv" else by_pip), *flags], check=True, env=environ, capture_output=True
            )

        return python, install

    return make


def counted(python):
    """What of raycrew-alpha counts in the key of an environment that is made from an interpreter."""
    code = """
        import json
        from raycrew.venv_manager import EnvironmentSpec, identify
        print(json.dumps(identify(EnvironmentSpec.requirements(["x"]))["carried"]["raycrew"]["raycrew-alpha"]))
    """
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    said = subprocess.check_output([python, "-c", textwrap.dedent(code)], env=environ, text=True)
    return json.loads(said)


@pytest.mark.long
@pytest.mark.slow
def test_equal_wheels_count_alike_however_installed(fresh, wheel):
    python, install = fresh("by-uv", "--without-pip")
    install("uv", wheel)
    counts = [counted(python)]
    other, install = fresh("by-pip")
    for words in ("--no-compile", "--compile", "--force-reinstall"):
        install("pip", words, "--force-reinstall", wheel)
        counts.append(counted(other))
    install("uv", "--reinstall", "--compile-bytecode", wheel)
    counts.append(counted(other))
    assert len(set(counts)) == 1
    (file,) = (other.parents[1]).glob("lib/*/site-packages/raycrew/alpha/__init__.py")
    file.write_text("VALUE = 2\n")  # as long as before
    edited = counted(other)
    file.unlink()
    assert len({counts[0], edited, counted(other)}) == 3


def test_another_file_or_another_wheel_counts(fresh, tmp_path, wheel):
    python, install = fresh("one", "--without-pip")
    install("uv", wheel)
    before = counted(python)
    for files in (FILES | {"raycrew/alpha/more.py": ""}, FILES | {"raycrew/alpha/.hidden": "y\n"}):
        name, content = make_wheel("raycrew-alpha", "0.1", files=files)
        (tmp_path / name).write_bytes(content)
        install("uv", "--reinstall", tmp_path / name)
        assert counted(python) != before
