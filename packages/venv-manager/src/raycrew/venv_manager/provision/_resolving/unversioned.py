"""A source outside of git: which of its files its wheel is made of, as its source archive tells."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from raycrew.venv_manager._spec import content_hash, files_below, is_litter, named_files
from raycrew.venv_manager._store import shipped, tops_of
from raycrew.venv_manager.errors import SpecError

_MODULES = (".py", ".pyi")


@dataclass(frozen=True, slots=True)
class Shipped:
    """What of a folder counted when a wheel of it was built, and what did not.

    Attributes:
        files: Path below the folder to SHA-256.
        aside: The others: files, and folders (with a slash) that hold nothing that counts, as a whole; of the
            modules in these, each, too: a new one may make a package of its folder.
    """

    files: Mapping[str, str]
    aside: frozenset[str]

    @classmethod
    def of(cls, folder: Path, archive: Iterable[str], held: Mapping[str, str]) -> Self:
        """What counts: what the source archive has, what the source names itself, what may come into a wheel.

        So does what lies directly beside the project file, where versions and requirements are read from.

        Args:
            folder: The source.
            archive: The paths that its source archive holds.
            held: What its wheel holds, with sums.
        """
        there = _names(folder)
        counted = there & {*archive, *named_files(folder)} | {name for name in there if "/" not in name}
        may_come = shipped(str(folder), sorted(_apart(there, counted)), held, tops_of(counted, held))
        counted |= {
            n for n in there if n in may_come or any(n.startswith(m) for m in may_come if m[-1] == "/")
        }
        return cls({n: content_hash(folder / n) for n in sorted(counted)}, frozenset(_aside(there, counted)))

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `record`."""
        return cls(record["files"], frozenset(record["aside"]))

    def record(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {"files": dict(self.files), "aside": sorted(self.aside)}

    def stays(self, folder: Path) -> bool:
        """Whether a wheel of the folder would come out the same: what counts is as it was, nothing is new."""
        try:
            there = _names(folder)
            return (
                self.files.keys() <= there
                and _aside(there, self.files.keys()) <= self.aside
                and all(content_hash(folder / name) == known for name, known in self.files.items())
            )
        except SpecError:  # something vanished while it was read
            return False


def _names(folder: Path) -> set[str]:
    """Paths of the files below a folder, without caches and what builds leave."""
    names = (path.removeprefix(f"{folder}/") for path in files_below(str(folder)))
    return {name for name in names if not is_litter(str(folder), name)}


def _apart(there: Iterable[str], counted: Iterable[str]) -> set[str]:
    """The files that do not count; of folders without any that does, the outermost."""
    needed = {folder for name in counted for folder in _folders(name)}
    beside = set(there) - set(counted)
    return {next((f for f in _folders(name) if f not in needed), name) for name in beside}


def _aside(there: Iterable[str], counted: Iterable[str]) -> set[str]:
    """The same, and each module in such folders."""
    there = set(there)
    return _apart(there, counted) | {name for name in there - set(counted) if name.endswith(_MODULES)}


def _folders(name: str) -> list[str]:
    """The folders that a path leads through, from the outermost on, each with a slash."""
    parts = name.split("/")[:-1]
    return ["/".join(parts[: i + 1]) + "/" for i in range(len(parts))]
