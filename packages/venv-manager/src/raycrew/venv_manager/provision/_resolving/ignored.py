"""What git ignores of a source: told apart by whether it could come into a wheel, and looked at twice."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from raycrew.venv_manager._spec import (
    content_hash,
    files_below,
    holds_files,
    ignored_by_git,
    ignored_fingerprint,
    is_litter,
    named_files,
)
from raycrew.venv_manager._waiting import CachedProperty


@dataclass(frozen=True)
class Ignored:
    """The files that git ignores of a source at one moment, without caches and what builds leave.

    Attributes:
        folder: The source.
        counted: Names among them whose contents are looked at.
    """

    folder: Path
    counted: frozenset[str] = frozenset()

    @CachedProperty
    def names(self) -> list[str]:
        """Files, and folders (with a slash) as a whole; not those that hold nothing yet."""
        if not self.folder.is_dir():
            return []
        names = (name for name in ignored_by_git(str(self.folder)) if not is_litter(str(self.folder), name))
        return [name for name in names if holds_files(f"{self.folder}/{name.rstrip('/')}")]

    @CachedProperty
    def named(self) -> frozenset[str]:
        """Those that hold what the source itself says to uv that it is built from: its `cache-keys`."""
        found = named_files(self.folder) if self.names else set()
        return frozenset(
            n for n in self.names if n in found or (n.endswith("/") and any(f.startswith(n) for f in found))
        )

    @CachedProperty
    def marks(self) -> Mapping[str, tuple[int, ...]]:
        """When each file was changed last."""
        return self.marks_of(self.names)

    @CachedProperty
    def sums(self) -> Mapping[str, str]:
        """What the files hold that are looked at: those in no ignored folder, and what is counted."""
        looked_at = (name for name in self.names if not name.endswith("/") or name in self.counted)
        return {file: content_hash(file) for file in self.marks_of(looked_at)}

    def marks_of(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """When each file of some names was changed last."""
        found: dict[str, tuple[int, ...]] = {}
        for name in names:
            for file in files_below(f"{self.folder}/{name.rstrip('/')}"):
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    stat = os.stat(file)  # noqa: PTH116 - of perhaps very many
                    found[file] = (stat.st_ctime_ns, stat.st_mtime_ns, stat.st_size, stat.st_ino)
        return found

    @classmethod
    def seen(cls, folder: Path, counted: frozenset[str]) -> "Ignored":
        """What is there now, looked at once and remembered."""
        found = cls(folder, counted)
        _ = found.marks, found.sums
        return found

    def stays(self, names: Iterable[str], shipped: Iterable[str]) -> bool:
        """Whether files of some names are still what they were, or are what came into a wheel as they are."""
        names, as_they_are = set(names), {f"{self.folder}/{file}" for file in shipped}
        now = self.marks_of(names)
        gone = self.marks.keys() - now.keys()
        return not any(self._is_of(file, names) for file in gone) and all(
            file in as_they_are or self.marks.get(file) == mark or self.sums.get(file) == content_hash(file)
            for file, mark in now.items()
        )

    def _is_of(self, file: str, names: set[str]) -> bool:
        name = file.removeprefix(f"{self.folder}/")
        return name in names or any(name.startswith(n) for n in names if n.endswith("/"))

    def fingerprint(self, names: Iterable[str]) -> str:
        """SHA-256 over what lies there now under some names."""
        return ignored_fingerprint(str(self.folder), names)
