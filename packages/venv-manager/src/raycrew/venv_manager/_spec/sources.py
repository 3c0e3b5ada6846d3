"""Fingerprints of files and folders that decide what is in an environment."""

import hashlib
import os
import re
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from raycrew.venv_manager.errors import SpecError

_CACHES = frozenset({"__pycache__", "node_modules"})
_OUTPUT = frozenset({"build", "dist", "site"})  # only beside the project file: below, packages are named so
_NESTED = re.compile(r"(?P<flag>-r|--requirements?|-c|--constraints?)[\s=]*(?P<path>\S+)")
_hashes: dict[tuple[Callable[[str], str], str], tuple[tuple[int, int, int], str]] = {}


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file; read again only after its size, time or inode changed."""
    return _hashed(str(path), _of_bytes)


def archive_hash(path: str | Path) -> str:
    """SHA-256 over the names, sizes and CRC-32 sums of what a wheel holds; of any other file, over its bytes.

    A wheel lists those at its end, so that a wheelhouse of many gigabytes need not be read through.
    """
    return _hashed(str(path), _of_members)


def _hashed(name: str, read: Callable[[str], str]) -> str:
    try:
        stat = os.stat(name)  # noqa: PTH116 - in the hot path of every `ensure`
        mark = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        known = _hashes.get((read, name))
        if known is None or known[0] != mark:
            known = _hashes[read, name] = (mark, read(name))
    except OSError as error:
        raise SpecError(f"{name} cannot be read: {error}") from error
    return known[1]


def _of_bytes(name: str) -> str:
    with open(name, "rb") as file:  # noqa: PTH123
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_members(name: str) -> str:
    try:
        with zipfile.ZipFile(name) as archive:
            members = sorted((m.filename, m.file_size, m.CRC) for m in archive.infolist())
    except zipfile.BadZipFile:
        return _of_bytes(name)
    return hashlib.sha256(repr(members).encode()).hexdigest()


def folder_fingerprint(folder: str | Path) -> str:
    """SHA-256 over names and contents of a source folder, without caches, hidden files and build output."""
    digest = hashlib.sha256()
    root = str(folder)
    for path in _walk(root):
        digest.update(f"{path[len(root) :]}\0{file_hash(path)}\n".encode())
    return digest.hexdigest()


def _walk(folder: str, seen: set[str] | None = None) -> Iterator[str]:
    """All files below, through links to folders, too; each target of such links once."""
    skipped = _CACHES | (_OUTPUT if seen is None else frozenset())
    seen = {os.path.realpath(folder)} if seen is None else seen
    try:
        entries = sorted(os.scandir(folder), key=lambda e: e.name)
    except OSError as error:
        raise SpecError(f"{folder} cannot be read: {error}") from error
    for entry in entries:
        if entry.name.startswith(".") or entry.name.endswith((".egg-info", ".pyc")):
            continue
        if entry.is_dir():
            if entry.name in skipped and not _holds(entry, "__init__.py"):
                continue
            if entry.is_symlink():
                target = os.path.realpath(entry.path)
                if target in seen:
                    continue
                seen.add(target)
            if not _holds(entry, "pyvenv.cfg"):
                yield from _walk(entry.path, seen)
        elif entry.is_file():
            yield entry.path


def _holds(entry: os.DirEntry[str], name: str) -> bool:
    return os.path.exists(os.path.join(entry.path, name))  # noqa: PTH110, PTH118


def requirement_files(file: Path, *, constraints: bool = True) -> list[Path]:
    """A requirements file, and those that it includes, theirs in turn.

    Raises:
        SpecError: One cannot be read.
    """
    found: dict[Path, None] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop(0)
        if path in found:
            continue
        found[path] = None
        for line in requirement_lines(path):
            match = _NESTED.fullmatch(line)
            if match and "://" not in match["path"] and (constraints or match["flag"].lstrip("-")[0] == "r"):
                waiting.append((path.parent / match["path"]).resolve())
    return list(found)


def requirement_lines(file: Path) -> list[str]:
    """The lines of a requirements file, without comments.

    Raises:
        SpecError: It cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{file} cannot be read: {error}") from error
    texts = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines)
    return [text for text in texts if text]


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
    """All local folders and files that a project is made of: itself, its path sources, and theirs in turn."""
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
    return sorted(found)


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
        for path in root.glob(pattern):
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
