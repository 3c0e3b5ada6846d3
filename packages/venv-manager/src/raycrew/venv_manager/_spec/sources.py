"""Where a project's own sources lie: itself, its workspace, and the local folders and files that it names."""

import tomllib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from raycrew.venv_manager.errors import SpecError


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict, which later calls share: not to be changed.

    Raises:
        SpecError: It cannot be read.
    """
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {error}") from error


@lru_cache(maxsize=16)
def _parse(text: str) -> dict[str, Any]:
    """Files are asked for several times on the way to an environment; equal text is parsed once."""
    return tomllib.loads(text)


def workspace_root(project: Path) -> Path:
    """The folder whose lock file and settings a project uses: its workspace's, else its own."""
    for folder in (project, *project.parents):
        file = folder / "pyproject.toml"
        if file.is_file() and "workspace" in read_toml(file).get("tool", {}).get("uv", {}):
            return folder
    return project


def is_package(project: dict[str, Any]) -> bool:
    """Whether uv would install the project itself and not only its dependencies."""
    declared = project.get("tool", {}).get("uv", {}).get("package")
    return bool(declared) if declared is not None else "build-system" in project


def local_sources(project: Path) -> list[Path]:
    """All local folders and files that a project is made of: itself, its path sources, and theirs in turn.

    Their order is that of the project files, wherever these lie.
    """
    found: dict[Path, None] = {}
    waiting = [project]
    while waiting:
        folder = waiting.pop()
        if folder in found:
            continue
        data = read_toml(folder / "pyproject.toml") if (folder / "pyproject.toml").is_file() else {}
        if folder != project or is_package(data):
            found[folder] = None
        waiting += [path for path in _declared(folder, data) if path not in found]
    return list(found)


def _declared(folder: Path, data: dict[str, Any]) -> Iterator[Path]:
    uv = data.get("tool", {}).get("uv", {})
    for declared in uv.get("sources", {}).values():
        for source in declared if isinstance(declared, list) else [declared]:
            if "path" in source:
                yield (folder / source["path"]).resolve()
            elif source.get("workspace"):
                yield from _members(workspace_root(folder))


def _members(root: Path) -> Iterator[Path]:
    workspace = read_toml(root / "pyproject.toml").get("tool", {}).get("uv", {}).get("workspace", {})
    left_out = {p.resolve() for pattern in workspace.get("exclude", ()) for p in root.glob(pattern)}
    for pattern in workspace.get("members", ()):
        for path in sorted(root.glob(pattern)):
            if (path / "pyproject.toml").is_file() and path.resolve() not in left_out:
                yield path.resolve()


def member(root: Path, package: str) -> Path:
    """Folder of the workspace member with this name.

    Raises:
        SpecError: There is none.
    """
    names = {}
    for folder in (root, *_members(root)):
        name = read_toml(folder / "pyproject.toml").get("project", {}).get("name", "")
        names[name.lower().replace("_", "-")] = folder
    try:
        return names[package.lower().replace("_", "-")]
    except KeyError:
        raise SpecError(
            f"the workspace {root} has no package {package!r}; it has {', '.join(sorted(names))}"
        ) from None
