"""What an interpreter is, wherever it lies."""

import os
import platform
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from raycrew.venv_manager._spec.spec import EnvironmentSpec
from raycrew.venv_manager.errors import SpecError

_DEADLINE_S = 60.0
# Its kind, its version, what compiled modules fit it, and what it was compiled for.
_ASK = """
import platform, sys, sysconfig
print(sys.implementation.name, platform.python_version(), sysconfig.get_config_var("SOABI"),
      sysconfig.get_platform(), sep="-")
"""
# Its values of the markers of dependencies (PEP 508), a line each; the driver's may be others.
_ASK_MARKERS = """
import os, platform, sys
own = sys.implementation.version
number = "{0.major}.{0.minor}.{0.micro}".format(own)
number += "" if own.releaselevel == "final" else own.releaselevel[0] + str(own.serial)
for name, value in {
    "implementation_name": sys.implementation.name, "implementation_version": number, "os_name": os.name,
    "platform_machine": platform.machine(), "platform_release": platform.release(),
    "platform_system": platform.system(), "platform_version": platform.version(),
    "python_full_version": platform.python_version(),
    "platform_python_implementation": platform.python_implementation(),
    "python_version": ".".join(platform.python_version_tuple()[:2]), "sys_platform": sys.platform,
}.items():
    print(name, value, sep="=")
"""


def interpreter(spec: EnvironmentSpec) -> str:
    """What counts of the interpreter that an environment is made from: a path by what is there.

    Raises:
        SpecError: There is nothing that can be run at the path that the spec names.
    """
    if spec.kind == "interpreter":
        return spec.path
    if spec.python is None:
        return f"{sys.implementation.name}-{platform.python_version()}"
    path = Path(spec.python)
    if not path.is_absolute():
        return spec.python
    return _said(path, _ASK)


def markers_of(python: Path) -> dict[str, str]:
    """What an interpreter gives for the markers of dependencies (PEP 508).

    Args:
        python: The interpreter, or the folder of an environment.

    Raises:
        SpecError: It cannot be run.
    """
    return dict(line.split("=", 1) for line in _said(python, _ASK_MARKERS).splitlines())


def _said(path: Path, what: str) -> str:
    path = path / "bin" / "python" if path.is_dir() else path
    try:
        found = os.stat(path)  # noqa: PTH116 - of what a link leads to
    except OSError as error:
        raise SpecError(f"--python {path} cannot be used: {error}") from error
    return _asked(str(path), what, (found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino))


@lru_cache(maxsize=32)
def _asked(path: str, what: str, _mark: tuple[int, ...]) -> str:
    """What an interpreter says of itself; asked again only after its file has changed."""
    try:
        done = subprocess.run(
            [path, "-I", "-S", "-c", what], capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SpecError(f"--python {path} cannot be used: {error}") from error
    if done.returncode or not done.stdout.strip():
        raise SpecError(
            f"--python {path} cannot be used: it ended with status {done.returncode}\n{done.stderr[-2000:]}"
        )
    return done.stdout.strip()
