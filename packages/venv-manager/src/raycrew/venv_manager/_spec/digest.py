"""The key of an environment: a digest of everything that decides what is in it, and what tells two apart."""

import hashlib
import json
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from raycrew.venv_manager._spec import locks as _lock
from raycrew.venv_manager._spec.fingerprints import archive_hash, file_hash, source_fingerprint, text_hash
from raycrew.venv_manager._spec.listed import (
    local_requirement,
    requirement_files,
    requirement_lines,
    statements_hash,
)
from raycrew.venv_manager._spec.sources import local_sources, member, read_toml, workspace_root
from raycrew.venv_manager._spec.spec import EnvironmentSpec
from raycrew.venv_manager._spec.uv_settings import counted_settings, inline_metadata
from raycrew.venv_manager._spec.variables import counted_variables
from raycrew.venv_manager.errors import SpecError

FORMAT = 1  # of the layout of an environment in the store: a change makes every key new
KEY_LENGTH = 24
# Fields of a spec that count by what lies there, or by the variables that uv is given.
_NOT_AS_WRITTEN = frozenset({
    "path", "requirement_files", "wheelhouse", "environment", "default_index", "indexes", "find_links",
    "offline",
})  # fmt: skip
_ARCHIVES = (".whl", ".zip", ".gz", ".tgz", ".bz2", ".xz", ".zst")  # that uv finds packages in


def identity(
    spec: EnvironmentSpec,
    environ: Mapping[str, str],
    carried: Mapping[str, Any],
    uv_version: Callable[[], str | None] = lambda: None,
    configured: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Everything that decides the content of an environment, as plain values.

    Args:
        spec: What it is made from. Paths do not count, what lies there does.
        environ: The whole environment that uv runs in.
        carried: What the driver's environment gives along.
        uv_version: Asked where uv itself chooses the versions, because no lock does.
        configured: What the user and the system tell uv.

    Raises:
        SpecError: A file or folder is missing, or a lock is asked for and there is none.
    """
    options = {k: v for k, v in spec.to_dict().items() if k not in _NOT_AS_WRITTEN}
    version = None if lock_file(spec) else uv_version()
    return {
        "format": FORMAT,
        "spec": options,
        "files": _files(spec, environ),
        "sources": _fingerprints(spec, environ),
        "variables": counted_variables(environ, dict(spec.environment)),
        "settings": {} if spec.wheelhouse else counted_settings(configured),
        "interpreter": _interpreter(spec),
        "platform": _platform(),
        "carried": dict(carried) if spec.carry else {},
        "uv": ".".join(version.split(".")[:2]) if version else None,
    }


def key_of(found: Mapping[str, Any]) -> str:
    """The digest of an identity, short enough for a path."""
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def explain(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What tells two identities apart, one line for each difference; empty when their keys are the same."""
    a, b = _flat(one), _flat(other)
    lines = []
    for name in sorted({*a, *b}):
        left, right = a.get(name, "absent"), b.get(name, "absent")
        if left != right:
            lines.append(f"{name}: {left} -> {right}")
    return lines


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        label = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{label}.")
        else:
            found[label] = value if isinstance(value, str) else json.dumps(value)
    return found


def project_folder(spec: EnvironmentSpec) -> Path:
    """Folder of the project or of the workspace member that a spec means."""
    folder = Path(spec.path)
    return member(workspace_root(folder), spec.package) if spec.package else folder


def lock_file(spec: EnvironmentSpec) -> Path | None:
    """The lock file that decides the versions, or None where they are chosen at build time.

    Raises:
        SpecError: The spec says that it is locked, and there is no lock file.
    """
    if spec.kind == "pylock":
        return Path(spec.path)
    if spec.kind == "script":
        path = Path(f"{spec.path}.lock")
    elif spec.kind == "project":
        path = workspace_root(Path(spec.path)) / "uv.lock"
    else:
        return None
    if path.is_file():
        return path
    if spec.locked or spec.frozen:
        flag = "--locked" if spec.locked else "--frozen"
        raise SpecError(
            f"{flag} is asked for, but there is no {path}; run `uv lock` and commit the file, or leave "
            f"{flag} out: the versions are then locked once, when the environment is built"
        )
    return None


def _files(spec: EnvironmentSpec, environ: Mapping[str, str]) -> dict[str, str]:
    found = {
        f"requirements.{i}" + (f".{j}" if j else ""): statements_hash(path, environ)
        for i, name in enumerate(spec.requirement_files)
        for j, path in enumerate(requirement_files(Path(name), environ))
    }
    if spec.kind in ("script", "pylock"):
        found[spec.kind] = text_hash(spec.path)
    if spec.kind == "project":
        folder = project_folder(spec)
        root = workspace_root(folder)
        found["project"] = text_hash(folder / "pyproject.toml")
        if root != folder:
            found["workspace"] = text_hash(root / "pyproject.toml")
    if (lock := lock_file(spec)) is not None:
        found["lock"] = text_hash(lock)
    return found


def _fingerprints(spec: EnvironmentSpec, environ: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in dict.fromkeys(_local(spec, environ)):
        label = _label(path)
        again = sum(name == label or name.startswith(f"{label} (") for name in found)
        content = source_fingerprint(path) if path.is_dir() else file_hash(path)
        found[f"{label} ({again + 1})" if again else label] = content
    if spec.wheelhouse:
        if not Path(spec.wheelhouse).is_dir():
            raise SpecError(f"there is no wheelhouse {spec.wheelhouse}")
        for path in sorted(Path(spec.wheelhouse).iterdir()):
            if path.suffix in _ARCHIVES and path.is_file():
                found[f"wheelhouse.{path.name}"] = archive_hash(path)
    return found


def _local(spec: EnvironmentSpec, environ: Mapping[str, str]) -> Iterator[Path]:
    """The folders and files of this machine that packages are built from."""
    if spec.kind == "project":
        yield from local_sources(project_folder(spec))
    if spec.kind == "script":
        yield from script_sources(Path(spec.path)).values()
    if spec.kind == "pylock":
        yield from _locked_paths(Path(spec.path), file_hash(spec.path))
    named = [local_requirement(text) for text in spec.packages]
    for name in spec.requirement_files:
        for file in requirement_files(Path(name), environ, constraints=False):
            named += [local_requirement(text, base_of(spec)) for text in requirement_lines(file, environ)]
    yield from (path for path in named if path is not None)


@lru_cache(maxsize=16)
def _locked_paths(file: Path, _hash: str) -> tuple[Path, ...]:
    named = [package.local_path for package in _lock.read_lock_file(file)]
    return tuple((file.parent / path).resolve() for path in named if path)


def base_of(spec: EnvironmentSpec) -> Path:
    """Where relative paths in requirements files start: the folder of the first of them."""
    return Path(spec.requirement_files[0]).parent if spec.requirement_files else Path.cwd()


def script_sources(script: Path) -> dict[str, Path]:
    """The local sources that a script names for its dependencies."""
    sources = inline_metadata(script).get("tool", {}).get("uv", {}).get("sources", {})
    return {
        name: (script.parent / source["path"]).resolve()
        for name, source in sources.items()
        if isinstance(source, dict) and "path" in source
    }


def _label(path: Path) -> str:
    """A name that stays when a checkout moves."""
    file = path / "pyproject.toml"
    name = read_toml(file).get("project", {}).get("name") if file.is_file() else None
    return str(name or path.name)


def _interpreter(spec: EnvironmentSpec) -> str:
    if spec.kind == "interpreter":
        return spec.path
    if spec.python is None:
        return f"{sys.implementation.name}-{platform.python_version()}"
    path = Path(spec.python)
    if path.is_absolute() and path.exists():
        real = path.resolve()
        return f"{real} {real.stat().st_mtime_ns}"
    return spec.python


@lru_cache(maxsize=1)
def _platform() -> str:
    return f"{sysconfig.get_platform()}-{'-'.join(platform.libc_ver())}"
