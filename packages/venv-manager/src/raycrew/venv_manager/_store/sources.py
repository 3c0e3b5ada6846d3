"""Local sources: what they are built to, kept until a fingerprint of their files changes."""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raycrew.venv_manager._build import (
    build_file,
    came_of,
    digest,
    is_compiled,
    members,
    members_of_source,
    shipped,
    tops_of,
    write_whole,
)
from raycrew.venv_manager._spec import (
    files_of_git,
    fingerprint,
    ignored_by_git,
    ignored_fingerprint,
    is_litter,
    key_of,
)
from raycrew.venv_manager._store.root import make_folder, used
from raycrew.venv_manager._store.shelf import Shelf
from raycrew.venv_manager._waiting import scratch
from raycrew.venv_manager.errors import UvError, VenvError, of_store

logger = logging.getLogger(__name__)

FOLDER = "sources"
# The parts of two records: of a source, and of one with what git ignores of it.
_SEEN, _BUILT = {"shipped": list, "aside": list}, {"wheel": str, "content": str}
_TRIES = 3  # of a source that changes while it is built


@dataclass(frozen=True, slots=True)
class Built:
    """A wheel of a local source.

    Attributes:
        name: Its file name.
        content: What it holds, as a digest that the same source has however often it is built.
        file: Where it is kept.
    """

    name: str
    content: str
    file: Path


@dataclass(frozen=True, slots=True)
class Source:
    """A folder or an archive that a wheel is built from.

    Attributes:
        path: Where it lies.
        fingerprint: Over what counts of its files, by git where it is a checkout.
        setting: What else decides what comes out: interpreter, platform, variables.
    """

    path: Path
    fingerprint: str
    setting: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Digest of both."""
        return key_of({"source": self.fingerprint, **self.setting})

    def ignored(self) -> list[str]:
        """What git ignores of it, without caches and what builds leave."""
        if not self.path.is_dir():
            return []
        return [name for name in ignored_by_git(str(self.path)) if not is_litter(str(self.path), name)]

    def key_with(self, names: Iterable[str]) -> str:
        """The digest, together with that of files that git ignores."""
        return key_of({"source": self.key, "ignored": ignored_fingerprint(str(self.path), names)})


class SourceShelf:
    """The wheels that one store keeps of local sources.

    Args:
        store: The store.
    """

    def __init__(self, store: Shelf) -> None:
        self.store = store
        self.folder = store.root / FOLDER

    def known(self, source: Source) -> Built | None:
        """The wheel of a source, if it was built since anything changed that could come into it."""
        seen, ignored = self._read(source.key, _SEEN), source.ignored()
        if seen is None or not {*ignored} <= {*seen["shipped"], *seen["aside"]}:
            return None
        key = source.key_with(name for name in seen["shipped"] if name in ignored)
        found = self._read(key, _BUILT)
        if found is None:
            return None
        file = self._file(key, found["wheel"])
        self.store.trust.check_one(file, self.store.root)
        return Built(found["wheel"], found["content"], file) if file.exists() else None

    def _read(self, key: str, parts: Mapping[str, type]) -> dict[str, Any] | None:
        """A record, or None where there is none, or a damaged one."""
        file = self.folder / f"{key}.json"
        self.store.trust.check_one(self.folder, self.store.root)
        self.store.trust.check_one(file, self.store.root)
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        used(file)
        whole = isinstance(found, dict) and all(isinstance(found.get(n), kind) for n, kind in parts.items())
        return found if whole else None

    def _file(self, key: str, name: str) -> Path:
        return self.folder / key / name

    def build(
        self, source: Source, environ: Mapping[str, str], python: str | None, timeout_s: float
    ) -> Built:
        """Build a wheel and keep it, with what of that which git ignores came into it.

        Raises:
            UvError: It does not build.
            VenvError: Its files change again and again while it is built.
            StoreError: It cannot be kept.
        """
        for _ in range(_TRIES):
            built = self._build(source, environ, python, timeout_s)
            now = replace(source, fingerprint=fingerprint(source.path))
            if now == source:
                return self._kept(source, *built)
            source = now
        raise VenvError(f"the files of {source.path} changed each time while it was built")

    def _build(
        self, source: Source, environ: Mapping[str, str], python: str | None, timeout_s: float
    ) -> tuple[str, bytes, str, set[str]]:
        """File name and content of a wheel, what counts of it, and what of the ignored is in it."""
        with scratch("raycrew-venv-wheel-") as folder:
            made = folder / "wheel"
            made.mkdir()
            wheel = build_file("--wheel", source.path, made, environ, python, timeout_s)
            content = wheel.read_bytes()
            held = members(content)
            came = self._shipped(source, source.ignored(), held)
            told = digest(held)
            if is_compiled(held):
                (folder / "sdist").mkdir()
                told = _of_sdist(source, folder / "sdist", came, held, environ, python, timeout_s)
        return wheel.name, content, told, came

    def _kept(self, source: Source, name: str, wheel: bytes, told: str, came: set[str]) -> Built:
        key, ignored = source.key_with(came), source.ignored()
        self._keep(key, {"wheel": name, "content": told}, wheel)
        self._keep(source.key, {"shipped": sorted(came), "aside": sorted({*ignored} - came)})
        return Built(name, told, self._file(key, name))

    def _shipped(self, source: Source, ignored: list[str], held: Mapping[str, str]) -> set[str]:
        if not ignored:
            return set()
        tops = tops_of(files_of_git(str(source.path)), held)
        return shipped(str(source.path), ignored, held, tops)

    def _keep(self, key: str, facts: Mapping[str, Any], wheel: bytes | None = None) -> None:
        try:
            make_folder(self.store.root, FOLDER)
            if wheel is not None:
                (self.folder / key).mkdir(0o755, exist_ok=True)
                write_whole(self._file(key, str(facts["wheel"])), wheel)
            write_whole(self.folder / f"{key}.json", json.dumps(facts).encode())
        except OSError as error:
            raise of_store(error, self.folder) from error


def _of_sdist(
    source: Source, into: Path, came: Iterable[str], held: Mapping[str, str], environ: Mapping[str, str],
    python: str | None, timeout_s: float,
) -> str:  # fmt: skip
    """What counts of a source with compiled parts: what it is compiled from, and what came as it was."""
    along = came_of(str(source.path), came, held)
    if source.path.is_dir():
        try:
            archive = build_file("--sdist", source.path, into, environ, python, timeout_s)
            return digest(members_of_source(archive) | along)
        except UvError as error:  # not every backend has source archives: then all of its files count
            logger.debug("%s has no source archive: %s", source.path, error)
    return digest({"source": source.fingerprint} | along)
