"""Does an interpreter work, and does it fit the driver's? A bad one makes Ray hang without an error."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raycrew.venv_manager._store.building.engines import Needs, engine_misfits
from raycrew.venv_manager._store.building.versions import same_version
from raycrew.venv_manager._waiting import end, start
from raycrew.venv_manager.errors import IncompatibleEnvironmentError, ProbeError

_SCRIPT = """
import importlib, importlib.metadata as metadata, json, re, sys, time
start = time.perf_counter()
failed, versions, needs = {}, {}, {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
for dist in metadata.distributions():
    name = re.sub("[-_.]+", "-", dist.metadata["Name"] or "").lower()
    if name in ("ray", "torch") or name.startswith("raycrew-"):
        versions.setdefault(name, dist.version)
    if re.match("vllm(-|$)|raycrew-", name):
        needed = [line for line in dist.requires or () if re.match(r"(ray|torch)(?![\\w.-])", line)]
        needs.setdefault(name, (dist.version, needed))
print("\\n@@raycrew@@" + json.dumps({
    "python": list(sys.version_info[:3]), "versions": versions, "failed": failed, "needs": needs,
    "seconds": time.perf_counter() - start,
}))
"""
_MARK = "@@raycrew@@"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What an interpreter must be like in order to run a worker of this driver.

    Attributes:
        python: (major, minor) of the driver, or None where it does not matter.
        ray: Version of the driver's Ray, or None where the driver has none.
        versions: Versions of the raycrew distributions that must be there.
        imports: Modules that must be importable.
    """

    python: tuple[int, int] | None = None
    ray: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[str, ...] = ()

    def to_list(self) -> list[Any]:
        """All of it, ready for JSON."""
        python = list(self.python) if self.python else None
        return [python, self.ray, dict(self.versions), list(self.imports)]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> "Expectation":
        """The inverse of `to_list`."""
        python, ray, versions, imports = values
        return cls(tuple(python) if python else None, ray, versions, tuple(imports))


@dataclass(frozen=True, slots=True)
class Probe:
    """What an interpreter said of itself.

    Attributes:
        python: Its path.
        version: (major, minor, micro).
        versions: Versions of ray, torch and raycrew's distributions in it.
        failed: Module to the error of its import.
        seconds: Time that the imports took in it.
        needs: What distributions of vLLM, and raycrew's, require of torch and Ray.
    """

    python: str
    version: tuple[int, int, int]
    versions: Mapping[str, str]
    failed: Mapping[str, str]
    seconds: float
    needs: Needs = field(default_factory=dict)


def probe(
    python: str | Path,
    imports: Sequence[str] = (),
    *,
    timeout_s: float = 300.0,
    environ: Mapping[str, str] = os.environ,
    pass_fds: Sequence[int] = (),
) -> Probe:
    """Start an interpreter, import modules in it, and hear its versions.

    What `pass_fds` names it inherits: a lock that must outlive this process.

    Raises:
        ProbeError: It does not exist, cannot be run, crashes or hangs.
    """
    path = str(python)
    if not os.access(path, os.X_OK) or Path(path).is_dir():
        raise ProbeError(f"there is no interpreter {path} on this machine", python=path)
    clean = {k: v for k, v in environ.items() if not k.startswith("PYTHON") and k != "VIRTUAL_ENV"}
    command = [path, "-I", "-B", "-c", _SCRIPT, json.dumps(list(imports))]
    try:
        process = start(command, environ=clean, cwd="/", pass_fds=pass_fds)
    except OSError as error:
        raise ProbeError(f"{path} cannot be run: {error}", python=path) from error
    try:
        output, said_else = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        names = ", ".join(imports)
        raise ProbeError(f"{path} did not import {names} within {timeout_s:g} s", python=path) from None
    finally:
        end(process)
    _, mark, answer = output.rpartition(_MARK)
    if process.returncode or not mark:
        tail = "\n".join((output + said_else).splitlines()[-20:])
        raise ProbeError(
            f"{path} ended with status {process.returncode} when probed\n{tail}", python=path, tail=tail
        )
    said: dict[str, Any] = json.loads(answer)
    major, minor, micro = said["python"]
    needs = {name: (version, tuple(needed)) for name, (version, needed) in said["needs"].items()}
    return Probe(path, (major, minor, micro), said["versions"], said["failed"], said["seconds"], needs)


def check(found: Probe, expected: Expectation) -> None:
    """Compare what an interpreter is with what it must be.

    Raises:
        IncompatibleEnvironmentError: It does not fit; the message says what to change.
    """
    lines = list(_misfits(found, expected))
    if lines:
        text = "\n".join(f"  - {line}" for line in lines)
        raise IncompatibleEnvironmentError(
            f"{found.python} cannot run workers of this driver ({sys.executable}):\n{text}",
            python=found.python,
        )


def _misfits(found: Probe, expected: Expectation) -> list[str]:
    lines = []
    if expected.python is not None and found.version[:2] != expected.python:
        ours, theirs = ".".join(map(str, expected.python)), ".".join(map(str, found.version))
        lines.append(
            f"it is Python {theirs}, the driver is {ours}: ask for `--python {ours}`, or change the driver's"
        )
    has = found.versions.get("ray")
    if expected.ray is not None and has is None:
        lines.append(f"it has no ray: add `ray=={expected.ray}` to its requirements")
    elif expected.ray is not None and not same_version(has, expected.ray):
        lines.append(
            f"it has ray {has}, the driver {expected.ray}: change the pin in the environment's requirements "
            f"to {expected.ray}, or install {has} for the driver"
        )
    for name, version in expected.versions.items():
        has = found.versions.get(name)
        if not same_version(has, version):
            lines.append(
                f"it has {name} {has or '(none)'}, the driver {version}: build it anew from the driver's"
            )
    lines += engine_misfits(found.needs, found.versions, expected.ray)
    lines += [f"`import {name}` fails there: {error}" for name, error in found.failed.items()]
    return lines
