"""What was chosen for what was asked: versions, kept until others are asked for."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from raycrew.venv_manager._spec import Package, locked_versions, read_lock, without_credentials, write_lock
from raycrew.venv_manager._store import CHOICES, Shelf, make_folder, write_whole
from raycrew.venv_manager.errors import of_store

_PARTS = {"lock": str, "packages": dict, "sources": dict, "carried": list}


@dataclass(frozen=True, slots=True)
class Choice:
    """The versions of an environment, without what is built here.

    Attributes:
        lock: A lock file (PEP 751) of what comes from indexes and URLs.
        packages: Names to versions and hashes of those, which count in the key: places do not.
        sources: Names of distributions that are built here, to the names of their sources among what was
            asked for.
        carried: Names of those that the driver gives along.
    """

    lock: str
    packages: Mapping[str, str]
    sources: Mapping[str, str] = field(default_factory=dict)
    carried: tuple[str, ...] = ()

    @classmethod
    def of(cls, packages: Iterable[Package], sources: Mapping[str, str], carried: Iterable[str]) -> "Choice":
        """A choice of these entries of a lock."""
        lock = without_credentials(write_lock(packages))
        return cls(lock, _versions(lock), dict(sources), tuple(sorted(carried)))

    def entries(self) -> list[Package]:
        """The entries of its lock."""
        return read_lock(self.lock)


def _versions(lock: str) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for name, version, hashes in locked_versions(lock):
        told = hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:16] if hashes else "without hashes"
        found.setdefault(name, []).append(f"{version or ''} {told}".strip())
    return {name: ", ".join(versions) for name, versions in found.items()}


class ChoiceShelf:
    """The choices that one store keeps.

    Args:
        store: The store.
    """

    def __init__(self, store: Shelf) -> None:
        self.store = store
        self.folder = store.root / CHOICES

    def get(self, asked: str) -> Choice | None:
        """What was chosen for something asked, by its digest; None where nothing was, or it is damaged.

        Raises:
            UntrustedStoreError: Others than trusted users may have written it.
        """
        file = self.folder / f"{asked}.json"
        if not file.exists():
            return None
        self.store.trust.check_root(self.store.root)
        found = self.store.record(file, _PARTS)
        if found is None:
            return None
        return Choice(found["lock"], found["packages"], found["sources"], tuple(found["carried"]))

    def keep(self, asked: str, choice: Choice) -> None:
        """Keep a choice, in one piece.

        Raises:
            StoreError: It cannot be written.
            DiskFullError: No space is left.
        """
        file = self.folder / f"{asked}.json"
        try:
            make_folder(self.store.root, CHOICES)
            write_whole(file, json.dumps(asdict(choice)).encode())
        except OSError as error:
            raise of_store(error, file) from error
