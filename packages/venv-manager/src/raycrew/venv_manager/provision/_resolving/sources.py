"""Local sources: what they are built to, kept until a fingerprint of their files changes."""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raycrew.venv_manager._spec import (
    KEY_LENGTH,
    build_sources,
    declared,
    files_of_git,
    fingerprint,
    has_build_code,
    key_of,
)
from raycrew.venv_manager._store import (
    SOURCES,
    Store,
    build_file,
    came_of,
    digest,
    is_compiled,
    make_folder,
    members,
    members_of_source,
    read_by_compilers,
    shipped,
    tops_of,
    write_whole,
)
from raycrew.venv_manager._waiting import Report, scratch, silent
from raycrew.venv_manager.errors import InputsChangedError, UvError, of_store
from raycrew.venv_manager.provision._resolving.ignored import Ignored
from raycrew.venv_manager.provision._resolving.unversioned import Shipped

logger = logging.getLogger(__name__)

# The parts of two records: of a source, and of one with what git ignores of it.
_SEEN, _BUILT = {"counted": list, "aside": list}, {"wheel": str, "content": str}
# And of one outside of git: what its wheel was made of when it was built last.
_PLACED = {"files": dict, "aside": list, "built": str}
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
        setting: What else decides what comes out: interpreter, platform, variables, settings of uv, and local
            sources that it is built with.
        name: Of the package.
        environ: The variables that it is built with, of which those count that it names.
        needs: What its consumer says that its build requires, too.
    """

    path: Path
    fingerprint: str
    setting: Mapping[str, Any]
    name: str
    environ: Mapping[str, str] = field(repr=False, compare=False)
    needs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Digest of both."""
        return key_of({"source": self.fingerprint, **self.setting})

    @property
    def place_key(self) -> str:
        """Digest of where it lies and of all that decides but its own files."""
        said = declared(self.path, self.environ) if self.path.is_dir() else {}
        return key_of({"place": str(self.path), "said": said, **self.setting})

    def now(self) -> "Source":
        """The same source, as it and what it is built with are now."""
        setting = {**self.setting, "built with": built_with(self.path, self.needs, self.environ)}
        return replace(self, fingerprint=fingerprint(self.path, self.environ), setting=setting)

    def key_with(self, names: Iterable[str]) -> str:
        """The digest, together with that of files that git ignores."""
        return key_of({"source": self.key, "ignored": Ignored(self.path).fingerprint(names)})


def built_with(path: Path, needs: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """Fingerprints of the local sources that a source is built with."""
    return sorted({fingerprint(source, environ) for source in build_sources(path, needs)})


@dataclass(frozen=True, slots=True)
class _Made:
    """A wheel that was built: what counts of it; what git ignores and came into it, which of it unchanged."""

    name: str
    wheel: bytes
    told: str
    came: frozenset[str]
    as_it_is: frozenset[str]
    is_compiled: bool

    def counting(self, source: Source, names: Iterable[str]) -> "_Made":
        """What a compiler makes is told by what goes in: these ignored files and local builders, too."""
        if not self.is_compiled:
            return self
        read = Ignored(source.path).fingerprint(names)
        said = key_of(declared(source.path, source.environ))
        needs = ",".join(source.setting["built with"])
        told = {"made of": self.told, "ignored": read, "said": said, "built with": needs}
        return replace(self, told=digest(told))


class SourceShelf:
    """The wheels that one store keeps of local sources.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.folder = store.root / SOURCES

    def known(self, source: Source) -> Built | None:
        """The wheel of a source, if it was built since anything changed that could come into it."""
        seen, ignored = self._record(source.key, _SEEN), Ignored(source.path).names
        if seen is None or not {*ignored} <= {*seen["counted"], *seen["aside"]}:
            return self._known_outside_git(source)
        return self._known(source.key_with(name for name in seen["counted"] if name in ignored))

    def _known_outside_git(self, source: Source) -> Built | None:
        """The wheel of a source outside of git, if all that its source archive holds is as it was."""
        seen = self._record(source.place_key, _PLACED)
        if seen is None or not seen["files"] or files_of_git(str(source.path)) or has_build_code(source.path):
            return None
        return self._known(seen["built"]) if Shipped.from_record(seen).stays(source.path) else None

    def _known(self, key: str) -> Built | None:
        found = self._record(key, _BUILT)
        if found is None:
            return None
        file = self._file(key, found["wheel"])
        self.store.trust.check_one(file, self.store.root)
        return Built(found["wheel"], found["content"], file) if file.exists() else None

    def _record(self, key: str, parts: Mapping[str, type]) -> dict[str, Any] | None:
        return self.store.record(self.folder / f"{key}.json", parts)

    def _file(self, key: str, name: str) -> Path:
        return self.folder / key / name

    def build(
        self, source: Source, environ: Mapping[str, str], python: str | None, report: Report = silent
    ) -> Built:
        """Build a wheel and keep it, with what of that which git ignores came into it; one at a time does.

        Raises:
            UvError: It does not build.
            InputsChangedError: Its files change again and again while it is built.
            StoreError: It cannot be kept, or another process did not end in time.
        """
        self.store.need_writable(source.key)
        place = hashlib.sha256(os.fsencode(source.path)).hexdigest()[:KEY_LENGTH]
        locks, timeout_s = self.store.locks(f"source-{place}"), self.store.build_timeout_s
        with locks.building(timeout_s, report, lambda: self.known(source) is not None):
            return self.known(source) or self._built(source, environ, python)

    def _built(self, source: Source, environ: Mapping[str, str], python: str | None) -> Built:
        """A wheel of files that stayed as they are while it was built.

        Of those that git ignores some may change all the time: such a wheel is used, as it counts by what it
        holds, but not again.
        """
        counted = Ignored(source.path).named
        for _ in range(_TRIES):
            before = Ignored.seen(source.path, counted)
            made = self._build(source, environ, python, self.store.build_timeout_s)
            now, after = source.now(), Ignored(source.path)
            if now == source:
                files = {name for name in after.names if not name.endswith("/")}
                relevant = made.came | after.named | files
                if before.stays(counted | relevant, made.as_it_is):
                    kept = self._kept(source, made.counting(source, relevant), relevant, after)
                    self._note(source, made, kept, environ, python)
                    return kept
                if made.came <= counted:
                    steady = {name for name in relevant if before.stays({name}, made.as_it_is)}
                    return self._kept_once(source, made.counting(source, steady | after.named))
            source, counted = now, counted | made.came
        raise InputsChangedError(f"the files of {source.path} changed each time while it was built")

    def _build(
        self, source: Source, environ: Mapping[str, str], python: str | None, timeout_s: float
    ) -> "_Made":
        with scratch("raycrew-venv-wheel-") as folder:
            made = folder / "wheel"
            made.mkdir()
            wheel = build_file("--wheel", source.path, source.name, made, environ, python, timeout_s)
            content = wheel.read_bytes()
            held = members(content)
            names = Ignored(source.path).names
            came = self._shipped(source, names, held)
            told = digest(held)
            if is_compiled(held):
                (folder / "sdist").mkdir()
                told = _of_sdist(source, folder / "sdist", came, held, environ, python, timeout_s)
        along = came_of(str(source.path), names, held)
        return _Made(wheel.name, content, told, frozenset(came), frozenset(along), is_compiled(held))

    def _kept(self, source: Source, made: "_Made", counted: frozenset[str], ignored: Ignored) -> Built:
        key = source.key_with(counted)
        self._keep(key, {"wheel": made.name, "content": made.told}, made.wheel)
        self._keep(source.key, {"counted": sorted(counted), "aside": sorted({*ignored.names} - counted)})
        return Built(made.name, made.told, self._file(key, made.name))

    def _note(
        self, source: Source, made: "_Made", kept: Built, environ: Mapping[str, str], python: str | None
    ) -> None:
        """Note what a source outside of git is made of; its source archive is made at the second build."""
        if made.is_compiled or not source.path.is_dir() or files_of_git(str(source.path)):
            return
        found = Shipped({}, frozenset())
        if self._record(source.place_key, _PLACED) is not None and not has_build_code(source.path):
            try:
                with scratch("raycrew-venv-sdist-") as folder:
                    archive = build_file(
                        "--sdist",
                        source.path,
                        source.name,
                        folder,
                        environ,
                        python,
                        self.store.build_timeout_s,
                    )
                    names = members_of_source(archive)
            except UvError as error:  # not every backend has source archives: then all of its files count
                logger.debug("%s has no source archive: %s", source.path, error)
            else:
                found = Shipped.of(source.path, names, members(made.wheel))
        if source.now() == source:  # else an edit came between
            self._keep(source.place_key, {**found.record(), "built": kept.file.parent.name})

    def _kept_once(self, source: Source, made: "_Made") -> Built:
        """Kept under what it holds, so that nothing finds it again by its files."""
        logger.debug("what git ignores of %s changed while it was built", source.path)
        key = key_of({"source": source.key, "content": made.told})
        self._keep(key, {"wheel": made.name, "content": made.told}, made.wheel)
        return Built(made.name, made.told, self._file(key, made.name))

    def _shipped(self, source: Source, ignored: list[str], held: Mapping[str, str]) -> set[str]:
        if not ignored:
            return set()
        tops = tops_of(files_of_git(str(source.path)), held)
        return shipped(str(source.path), ignored, held, tops)

    def _keep(self, key: str, facts: Mapping[str, Any], wheel: bytes | None = None) -> None:
        try:
            make_folder(self.store.root, SOURCES)
            if wheel is not None:
                (self.folder / key).mkdir(0o755, exist_ok=True)
                write_whole(self._file(key, str(facts["wheel"])), wheel, sync=True)
            write_whole(self.folder / f"{key}.json", json.dumps(facts).encode(), sync=True)
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
            archive = build_file("--sdist", source.path, source.name, into, environ, python, timeout_s)
            held = members_of_source(archive)
            return digest(read_by_compilers(str(source.path), held) | held | along)
        except UvError as error:  # not every backend has source archives: then all of its files count
            logger.debug("%s has no source archive: %s", source.path, error)
    return digest({"source": source.fingerprint} | along)
