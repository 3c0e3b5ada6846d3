"""What lies on the disk for a spec: its project, its lock file, its requirements files, its local sources."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from raycrew.venv_manager._spec import locks as _lock
from raycrew.venv_manager._spec.local import (
    archive_hash,
    declared,
    file_hash,
    local_requirement,
    local_sources,
    lock_hash,
    may_count,
    member,
    read_toml,
    requirement_files,
    requirement_lines,
    source_fingerprint,
    statements_hash,
    with_theirs,
    without_credentials,
    workspace_root,
)
from raycrew.venv_manager._spec.spec import EnvironmentSpec
from raycrew.venv_manager._spec.uv_settings import inline_metadata
from raycrew.venv_manager.errors import SpecError

_ARCHIVES = (".whl", ".zip", ".gz", ".tgz", ".bz2", ".xz", ".zst")  # that uv finds packages in
# Of a project file or of a script's metadata, beside what they tell uv.
_TABLES = ("build-system", "project", "dependency-groups", "dependencies", "requires-python")
_DECIDES = frozenset({"version", "dependencies", "optional-dependencies"})  # what other packages are chosen


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


def files(spec: EnvironmentSpec, environ: Mapping[str, str], sources: Mapping[str, Path]) -> dict[str, str]:
    """Hashes of what the files of a spec say: requirements, project, workspace, script, lock."""
    names = {path: name for name, path in sources.items()}
    found = {
        f"requirements.{i}" + (f".{j}" if j else ""): statements_hash(path, environ, base_of(spec), names)
        for i, name in enumerate(spec.requirement_files)
        for j, path in enumerate(requirement_files(Path(name), environ))
    }
    if spec.kind == "script":
        found[spec.kind] = _told_hash(inline_metadata(Path(spec.path)))
    if spec.kind == "project":
        folder = project_folder(spec)
        root = workspace_root(folder)
        found["project"] = project_hash(folder / "pyproject.toml")
        if (own := root / "uv.toml").is_file():
            found["uv.toml"] = _told_hash({"tool": {"uv": read_toml(own)}})
        if root != folder:
            found["workspace"] = project_hash(root / "pyproject.toml")
    if (lock := lock_file(spec)) is not None:
        found["lock"] = lock_hash(lock)
    return found


def project_hash(file: Path) -> str:
    """SHA-256 over what a project file tells uv; not over comments, passwords, or where sources lie."""
    return _told_hash(read_toml(file))


def _told_hash(data: Mapping[str, Any]) -> str:
    told = dict(data.get("tool", {}).get("uv", {}))
    if "sources" in told:
        told["sources"] = {name: _without_paths(source) for name, source in told["sources"].items()}
    counted = {name: data[name] for name in _TABLES if name in data} | {"uv": told}
    text = without_credentials(json.dumps(counted, sort_keys=True, default=str))
    return hashlib.sha256(text.encode()).hexdigest()


def _without_paths(source: Any) -> Any:
    if isinstance(source, list):
        return [_without_paths(one) for one in source]
    return {k: True if k == "path" else v for k, v in source.items()}


def wheelhouse(spec: EnvironmentSpec) -> dict[str, str]:
    """Names and hashes of what a wheelhouse holds.

    Raises:
        SpecError: There is no such folder.
    """
    if not spec.wheelhouse:
        return {}
    if not Path(spec.wheelhouse).is_dir():
        raise SpecError(f"there is no wheelhouse {spec.wheelhouse}")
    paths = sorted(Path(spec.wheelhouse).iterdir())
    return {path.name: archive_hash(path) for path in paths if path.suffix in _ARCHIVES and path.is_file()}


def source_paths(spec: EnvironmentSpec, environ: Mapping[str, str]) -> dict[str, Path]:
    """The folders and files of this machine that packages are built from, by names that are no paths."""
    found: dict[str, Path] = {}
    for path in _local(spec, environ):
        label = label_of(path)
        again = sum(name == label or name.startswith(f"{label} (") for name in found)
        found[f"{label} ({again + 1})" if again else label] = path
    return found


def fingerprint(path: Path, environ: Mapping[str, str]) -> str:
    """SHA-256 over what decides what a local source is built to in an environment of variables."""
    if not path.is_dir():
        return file_hash(path)
    own, said = source_fingerprint(path), declared(path, environ)
    return hashlib.sha256(json.dumps([own, said], sort_keys=True).encode()).hexdigest() if said else own


def requirements_hash(path: Path, fingerprint: str) -> str:
    """What of a local source decides which packages are chosen: all of it, unless a file says so."""
    file = path / "pyproject.toml"
    project = read_toml(file).get("project", {}) if file.is_file() else {}
    if "name" not in project or _DECIDES & set(project.get("dynamic", ())):
        return fingerprint
    return project_hash(file)


def _local(spec: EnvironmentSpec, environ: Mapping[str, str]) -> list[Path]:
    own = local_sources(project_folder(spec)) if spec.kind == "project" else []
    return list(dict.fromkeys([*own, *with_theirs(_named(spec, environ))]))


def _named(spec: EnvironmentSpec, environ: Mapping[str, str]) -> Iterator[Path]:
    conditional: list[tuple[Path, str]] = []
    if spec.kind == "script":
        conditional += [(path, marker) for _, path, marker in script_sources(Path(spec.path))]
    if spec.kind == "pylock":
        conditional += _locked_paths(Path(spec.path), file_hash(spec.path))
    yield from (path for path, marker in conditional if may_count(path, marker))
    named = [local_requirement(text) for text in spec.packages]
    for name in spec.requirement_files:
        for file in requirement_files(Path(name), environ, constraints=False):
            named += [local_requirement(text, base_of(spec)) for text in requirement_lines(file, environ)]
    yield from (path for path in named if path is not None)


@lru_cache(maxsize=16)
def _locked_paths(file: Path, _hash: str) -> tuple[tuple[Path, str], ...]:
    """The local sources of a lock: place, marker (may be empty)."""
    return tuple(
        ((file.parent / package.local_path).resolve(), package.data.get("marker", ""))
        for package in _lock.read_lock_file(file)
        if package.local_path
    )


def base_of(spec: EnvironmentSpec) -> Path:
    """Where relative paths in requirements files start: the folder of the first of them."""
    return Path(spec.requirement_files[0]).parent if spec.requirement_files else Path.cwd()


def script_sources(script: Path) -> list[tuple[str, Path, str]]:
    """The local sources that a script names for its dependencies: name, place, marker (may be empty)."""
    sources = inline_metadata(script).get("tool", {}).get("uv", {}).get("sources", {})
    return [
        (name, (script.parent / source["path"]).resolve(), source.get("marker", ""))
        for name, told in sources.items()
        for source in (told if isinstance(told, list) else [told])
        if "path" in source
    ]


def label_of(path: Path) -> str:
    """A name that stays when a checkout moves."""
    if not path.is_dir():
        return path.name
    file = path / "pyproject.toml"
    return str((read_toml(file).get("project", {}).get("name") if file.is_file() else None) or "unnamed")
