"""What tests of local sources share: a build backend of its own, and packages that use it."""

import json
import subprocess

from raycrew.venv_manager.testing import write_project

# Ships the module that is named as the project is, and what the project file says that it needs.
BACKEND = """
import pathlib, tomllib, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    name, info = project["name"], project["name"] + "-0.dist-info/"
    with zipfile.ZipFile(pathlib.Path(folder, f"{name}-0-py3-none-any.whl"), "w") as wheel:
        wheel.writestr(f"{name}.py", read(name, config_settings or {}))
        needs = "".join(f"Requires-Dist: {text}\\n" for text in project.get("dependencies", []))
        wheel.writestr(info + "METADATA", f"Metadata-Version: 2.1\\nName: {name}\\nVersion: 0\\n{needs}")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return f"{name}-0-py3-none-any.whl"
def read(name, settings):
    return pathlib.Path(f"{name}.py").read_text()
"""
_BUILT = '[build-system]\nrequires = {needs}\nbuild-backend = "{name}_backend"\nbackend-path = ["."]\n'


def write_package(folder, value, *, backend=BACKEND, needs=(), more="", **options):
    """A package whose one module says `VALUE`, built by a backend of its own; returns its folder."""
    name = options.pop("name", folder.name)
    built = _BUILT.format(needs=json.dumps(list(needs)), name=name)
    write_project(folder, name=name, more=built + more, **options)
    (folder / f"{name}.py").write_text(f"VALUE = {value}\n")
    (folder / f"{name}_backend.py").write_text(backend)
    return folder


def value(environment, name):
    """What the module of a package says in an environment."""
    code = f"import {name}; print({name}.VALUE)"
    return int(subprocess.check_output([environment.python, "-c", code], text=True))
