"""A driver that is installed anew before each run, as a development session does, builds nothing again."""

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from local_sources import write_package

import raycrew.venv_manager
from raycrew.venv_manager._uv import find_uv
from raycrew.venv_manager.testing import make_wheel, write_project

DRIVER = """
import sys
from raycrew.venv_manager import EnvironmentSpec, ensure
for spec in (EnvironmentSpec.project(sys.argv[1]), EnvironmentSpec.requirements(["base"])):
    environment = ensure(spec)
    print(environment.key, environment.stamp["packages"]["raycrew-alpha"])
"""
NEEDED = ("packaging", "rich", "markdown_it", "mdurl", "pygments")


class Driver:
    """A virtual environment with one of raycrew's distributions, and a uv whose commands are written down."""

    def __init__(self, folder, environ):
        self.folder, self.uv = folder, find_uv(environ)
        subprocess.run([sys.executable, "-m", "venv", folder / "driver"], check=True)
        self.python = folder / "driver" / "bin" / "python"
        logged = folder / "logged-uv"
        logged.write_text(f'#!/bin/sh\necho "$1 $2" >>{folder}/asked\nexec {self.uv} "$@"\n')
        logged.chmod(0o755)
        needed = folder / "needed"
        needed.mkdir()
        for name in NEEDED:
            module = Path(importlib.util.find_spec(name).origin)
            place = module.parent if module.name == "__init__.py" else module
            (needed / place.name).symlink_to(place)
        (needed / "raycrew").mkdir()
        (needed / "raycrew" / "venv_manager").symlink_to(Path(raycrew.venv_manager.__file__).parent)
        own = Path(str(distribution("raycrew-venv-manager").locate_file("")))
        for info in own.glob("raycrew_venv_manager-*.dist-info"):
            (needed / info.name).symlink_to(info)
        self.environ = environ | {
            "PYTHONPATH": str(needed), "RAYCREW_UV": str(logged), "RAYCREW_VENV_DIR": str(folder / "store"),
        }  # fmt: skip
        self.environ.pop("PYTHONDONTWRITEBYTECODE", None)

    def install(self, tool, *words):
        name, content = make_wheel("raycrew-alpha", "0.1", files={"raycrew/alpha/__init__.py": "VALUE = 1\n"})
        (self.folder / name).write_bytes(content)
        by_uv = [self.uv, "pip", "install", "--python", self.python, "--reinstall"]
        by_pip = [
            self.python,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--force-reinstall",
        ]
        command = [
            *(by_uv if tool == "uv" else by_pip),
            "--no-index",
            "--no-deps",
            *words,
            self.folder / name,
        ]
        environ = {k: v for k, v in self.environ.items() if k != "PYTHONPATH"}
        subprocess.run(command, check=True, env=environ, capture_output=True)

    def say(self, *words):
        return subprocess.check_output([self.python, *words], env=self.environ, text=True)

    def asked(self):
        """What uv was asked for since the last question."""
        log = self.folder / "asked"
        lines = log.read_text().splitlines() if log.exists() else []
        log.write_text("")
        return [line for line in lines if not line.startswith("--version")]

    def listed(self):
        """The environments of the store, but for when they were used."""
        rows = json.loads(self.say("-m", "raycrew.venv_manager", "list", "--json"))
        return [{k: v for k, v in row.items() if "used" not in k} for row in rows]


INSTALLED = [("uv", "--compile-bytecode"), ("pip", "--no-compile"), ("pip", "--compile"), ("uv",)]


@pytest.mark.slow
@pytest.mark.hostile
@pytest.mark.parametrize(
    "again",
    [
        pytest.param(INSTALLED[1:2], id="by another tool"),
        pytest.param(INSTALLED, id="in many ways", marks=pytest.mark.long),
    ],
)
def test_the_second_and_the_third_run_build_nothing(tmp_path, environ, again):
    driver = Driver(tmp_path, environ)
    write_package(tmp_path / "inner", 1)
    sources = '[tool.uv.sources]\ninner = { path = "../inner" }\n'
    project = write_project(tmp_path / "job", dependencies=["inner", "demo"], more=sources)
    driver.install("uv")
    first = driver.say("-c", DRIVER, project)
    assert {"build --wheel", "pip compile", "pip install"} <= {
        line.replace(" -q", "") for line in driver.asked()
    }
    listed = driver.listed()
    assert len(listed) == 2
    driver.asked()
    for tool, *words in again:
        driver.install(tool, *words)
        assert driver.say("-c", DRIVER, project) == first
        assert driver.asked() == []
        assert driver.listed() == listed
