"""What a source itself says to uv that it is built from: the `cache-keys` of its project file."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raycrew.venv_manager._spec.local.checkout import commit_of_git, tags_of_git
from raycrew.venv_manager._spec.local.fingerprints import content_hash, is_litter
from raycrew.venv_manager._spec.local.sources import read_toml
from raycrew.venv_manager.errors import SpecError

_KINDS: Mapping[str, tuple[type, ...]] = {"file": (str,), "dir": (str,), "env": (str,), "git": (bool, dict)}
_MAGIC = re.compile(r"[*?\[]")
_BRACES = re.compile(r"\{([^{}]*)\}")


def declared(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What a source is built from beside its own files: each thing that it names, with a digest of it.

    Args:
        folder: The source.
        environ: The environment that it is built in.

    Raises:
        SpecError: It names what cannot be counted.
    """
    found: dict[str, str] = {}
    for kind, told in _cache_keys(folder):
        if kind == "env":
            found[f"env {told}"] = _sum(environ[told]) if told in environ else "absent"
        elif kind == "dir":
            found[f"dir {told}"] = str((folder / told).is_dir())
        elif kind == "git":
            found |= _of_git(folder, told)
        else:
            found |= {f"file {told} {name}": content_hash(path) for name, path in _apart(folder, told)}
    return found


def named_files(folder: Path) -> set[str]:
    """The files of a source that it names, as paths below it."""
    places = (p for kind, told in _cache_keys(folder) if kind == "file" for p in _places(folder, told))
    files = (file for base, rest in places for file in (base.glob(rest) if rest else [base]))
    return {file.relative_to(folder).as_posix() for file in files if file.is_relative_to(folder)}


def _cache_keys(folder: Path) -> Iterator[tuple[str, Any]]:
    file = folder / "pyproject.toml"
    told = read_toml(file).get("tool", {}).get("uv", {}) if file.is_file() else {}
    for key in told.get("cache-keys", ()):
        kinds = {"file": key} if isinstance(key, str) else key
        if not isinstance(kinds, dict) or len(kinds) != 1 or not _is_known(*next(iter(kinds.items()))):
            raise SpecError(
                f"{file} names {key!r} among its cache-keys, which cannot be counted: a change there would "
                "go unseen; name files (`file`), folders (`dir`), variables (`env`), or git's commit and tags"
            )
        yield from kinds.items()


def _is_known(kind: str, told: Any) -> bool:
    fits = isinstance(told, _KINDS.get(kind, ()))
    if kind == "git" and isinstance(told, dict):
        return told.keys() <= {"commit", "tags"}
    return fits and not (kind == "file" and told.startswith("!"))


def _of_git(folder: Path, told: bool | Mapping[str, bool]) -> dict[str, str]:
    asked = {"commit": told} if isinstance(told, bool) else told
    found = {}
    if asked.get("commit"):
        found["git commit"] = commit_of_git(str(folder))
    if asked.get("tags"):
        found["git tags"] = _sum(tags_of_git(str(folder)))
    return found


def _apart(folder: Path, pattern: str) -> Iterator[tuple[str, Path]]:
    """The files that a pattern names and that count neither as the source's own nor as ignored ones of it."""
    for base, rest in _places(folder, pattern):
        inside = base.is_relative_to(folder)
        if inside and (rest or not is_litter(str(folder), base.relative_to(folder).as_posix())):
            continue
        for file in sorted(base.glob(rest)) if rest else [base]:
            if file.is_file():
                yield os.path.relpath(file, base), file


def _places(folder: Path, pattern: str) -> Iterator[tuple[Path, str]]:
    """The folders that a pattern starts from, each with the rest of it; a file, with none.

    As in a list of what git ignores, a rest of one part is found at any depth.
    """
    for text in _without_braces(pattern):
        parts = Path(text).parts
        said = len(parts) if text == pattern else len(parts) - 1  # of a glob the last part stays one
        fixed = next((i for i, part in enumerate(parts) if _MAGIC.search(part)), said)
        base = Path(os.path.normpath(folder.joinpath(*parts[:fixed])))
        yield base, "/".join(parts[fixed:] if fixed or len(parts) != 1 else ("**", *parts))


def _without_braces(pattern: str) -> list[str]:
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    ways = (pattern[: match.start()] + way + pattern[match.end() :] for way in match[1].split(","))
    return [text for way in ways for text in _without_braces(way)]


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
