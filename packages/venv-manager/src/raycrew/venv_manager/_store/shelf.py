"""What a store holds, for those who read it: environments, recipes, locks, and who uses what."""

import json
import logging
import os
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from raycrew.venv_manager._store.building import PYTHON, Recipe
from raycrew.venv_manager._store.root import default_root, used, whole_path
from raycrew.venv_manager._store.stamps import STAMP, Environment, read_stamp
from raycrew.venv_manager._store.trust import Trust, owners_named
from raycrew.venv_manager._waiting import KeyLocks, Users, processes_using
from raycrew.venv_manager.errors import UntrustedStoreError

logger = logging.getLogger(__name__)

NAMES = "by-name"
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, TypeError, LookupError, AttributeError)


class Shelf:
    """Published environments in one folder.

    Args:
        root: The folder; `default_root` if left out.
        environ: Environment of the calling process.
        trusted_owners: As for `Store`.
    """

    def __init__(
        self, root: str | Path | None, environ: Mapping[str, str] | None, trusted_owners: Collection[str]
    ) -> None:
        self.environ = os.environ if environ is None else environ
        self.root = whole_path(root) if root else default_root(self.environ)
        self.trusted_owners = owners_named(trusted_owners, self.environ)
        self.trust = Trust.of(self.trusted_owners, {})

    def python(self, key: str) -> Path | None:
        """Path of a published environment's interpreter, or None. Reads nothing but the folder.

        Raises:
            UntrustedStoreError: Others than trusted users may have written it.
        """
        if not self._is_there(key):
            return None
        self.trust.check_entry(self.root / key, self.root)
        return self.path(key)

    def _is_there(self, key: str) -> bool:
        return (self.root / key / STAMP).exists() and os.access(self.path(key), os.X_OK)

    def check(self) -> None:
        """See that nobody but trusted users may write the store.

        Raises:
            UntrustedStoreError: Others may.
        """
        self.trust.check_root(self.root)
        self.trust.check_one(self.root / "locks", self.root)

    def path(self, key: str) -> Path:
        """Where an environment's interpreter is, once it is built."""
        return self.root / key / PYTHON

    def sealed(self, key: str) -> bool:
        """Whether an environment can be used, but never built again: its recipe and the store are closed."""
        return self.python(key) is not None and self.recipe(key) is None and not os.access(self.root, os.W_OK)

    def get(self, key: str) -> Environment | None:
        """A published environment with its stamp, or None; this process counts as its user from now on.

        One that was moved since it was built is None, so that it is built anew, where that can be done.

        Raises:
            UntrustedStoreError: Others than trusted users may have written it.
        """
        if self.python(key) is None or not self.locks(key).use() or not self._is_there(key):
            return None
        found = self._read(key)
        if found is None or found.built_at is None:
            return found
        if os.access(self.root, os.W_OK):
            return None
        logger.warning(
            "%s was built as %s: programs in its bin folder do not start", found.path, found.built_at
        )
        return found

    def look(self, key: str) -> Environment | None:
        """A published environment with its stamp, or None, without becoming its user.

        Raises:
            UntrustedStoreError: Others than trusted users may have written it.
        """
        if (self.root / key / STAMP).exists():
            self.trust.check_entry(self.root / key, self.root)
        return self._read(key)

    def _read(self, key: str) -> Environment | None:
        stamp = read_stamp(self.root / key)
        return None if stamp is None else Environment(key, self.root / key, stamp)

    def environments(self) -> list[Environment]:
        """All published environments that may be trusted, the newest first.

        Raises:
            UntrustedStoreError: Others than trusted users may write the store.
        """
        self.check()
        names = sorted(p.parent.name for p in self.root.glob(f"*/{STAMP}"))
        found = [e for e in map(self._look_or_warn, names) if e is not None]
        return sorted(found, key=lambda e: str(e.stamp["created"]), reverse=True)

    def _look_or_warn(self, key: str) -> Environment | None:
        try:
            return self.look(key)
        except UntrustedStoreError as error:
            logger.warning("%s is left out: %s", key, error)
            return None

    def recipe(self, key: str) -> Recipe | None:
        """The recipe that was kept for a key, or None.

        Raises:
            UntrustedStoreError: Others than trusted users may have written it.
        """
        file = self.recipe_file(key)
        self.trust.check_root(self.root)
        self.trust.check_one(file.parent, self.root)
        self.trust.check_one(file, self.root)
        try:
            return Recipe.from_bytes(file.read_bytes())
        except (FileNotFoundError, PermissionError, *_DAMAGED):
            return None

    def recipe_file(self, key: str) -> Path:
        """Where the recipe of a key is kept."""
        return self.root / "recipes" / f"{key}.zip"

    def record(self, file: Path, parts: Mapping[str, type]) -> dict[str, Any] | None:
        """What one of the store's records says, which counts as used; None where it is missing or damaged.

        Raises:
            UntrustedStoreError: Others than trusted users may have written it.
        """
        self.trust.check_one(file.parent, self.root)
        self.trust.check_one(file, self.root)
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        used(file)
        whole = isinstance(found, dict) and all(isinstance(found.get(n), kind) for n, kind in parts.items())
        return found if whole else None

    def users(self, entry: Path) -> Users:
        """The processes of this machine that run from an environment, by whatever name."""
        return processes_using(entry, self.root / NAMES)

    def locks(self, key: str) -> KeyLocks:
        """The locks of one environment."""
        return KeyLocks(self.root / "locks", key)
