"""The store: one folder per key, built in place, published by a stamp that is written last."""

import contextlib
import json
import logging
import os
import platform
import shutil
import uuid
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raycrew.venv_manager import errors
from raycrew.venv_manager._build import PYTHON, Build, Expectation, Recipe, Sync, check, probe, write_whole
from raycrew.venv_manager._waiting import KeyLocks, Report, Users, changes, processes_using, silent, slot

logger = logging.getLogger(__name__)

STAMP = "stamp.json"
NAMES = "by-name"


def default_root(environ: Mapping[str, str] = os.environ) -> Path:
    """`RAYCREW_VENV_DIR` (or `NEMO_RL_VENV_DIR`), else a folder in the user's cache."""
    named = environ.get("RAYCREW_VENV_DIR") or environ.get("NEMO_RL_VENV_DIR")
    if named:
        return Path(named).expanduser().absolute()
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache")
    return Path(cache, "raycrew", "venvs").absolute()


@dataclass(frozen=True, slots=True)
class Environment:
    """One published environment.

    Attributes:
        key: The digest that it is named by.
        path: Its folder in the store.
        stamp: What was written when it was published: spec, versions, sizes, seconds of each step, link mode.
    """

    key: str
    path: Path
    stamp: Mapping[str, Any]

    @property
    def python(self) -> Path:
        """Path of its interpreter."""
        return self.path / PYTHON


class Store:
    """Environments in one folder.

    Args:
        root: The folder; `default_root` if left out.
        environ: Environment that uv runs in.
        build_timeout_s: Deadline of each run of uv, and of waiting for another process's build.
        max_builds: Environments that are built at the same time on one machine.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        build_timeout_s: float = 3600.0,
        max_builds: int = 2,
    ) -> None:
        self.environ = os.environ if environ is None else environ
        self.root = Path(root).expanduser().absolute() if root else default_root(self.environ)
        self.build_timeout_s = build_timeout_s
        self.max_builds = max_builds
        self._probed: set[Path] = set()

    def python(self, key: str) -> Path | None:
        """Path of a published environment's interpreter, or None. Reads nothing but the folder."""
        path = self.path(key)
        return path if (self.root / key / STAMP).exists() and os.access(path, os.X_OK) else None

    def path(self, key: str) -> Path:
        """Where an environment's interpreter is, once it is built."""
        return self.root / key / PYTHON

    def sealed(self, key: str) -> bool:
        """Whether an environment can be used, but never built again: its recipe and the store are closed."""
        return self.python(key) is not None and self.recipe(key) is None and not os.access(self.root, os.W_OK)

    def get(self, key: str) -> Environment | None:
        """A published environment with its stamp, or None; this process counts as its user from now on."""
        if self.python(key) is None or not self.locks(key).use() or self.python(key) is None:
            return None
        return self.look(key)

    def on_this_machine(self, environment: Environment) -> Environment:
        """The same environment, once its interpreter was probed here; the machine that built it did so then.

        Raises:
            ProbeError: It does not work here, or does not fit the driver.
        """
        host = platform.node()
        mark = environment.path / "probed" / host
        if environment.stamp.get("host", host) == host or mark.exists() or mark in self._probed:
            return environment
        expected = Expectation.from_list(environment.stamp["expectation"])
        check(probe(environment.python, expected.imports, environ=self.environ), expected)
        self._probed.add(mark)
        with contextlib.suppress(OSError):  # where the store is read-only, each process probes once
            mark.parent.mkdir(exist_ok=True)
            mark.touch()
        return environment

    def _refuse_to_replace(self, key: str) -> None:
        """Another machine's environment is not built anew because its interpreter is not to be found here."""
        found = self.look(key)
        if (
            found is None
            or found.stamp.get("host", platform.node()) == platform.node()
            or os.access(found.python, os.X_OK)
        ):
            return
        target = os.path.realpath(found.python)
        raise errors.ProbeError(
            f"{found.python} leads to {target}, which is not on {platform.node()}: {found.stamp['host']} "
            "built it from the Python there; install that Python here, too, or give the machines stores of "
            "their own (RAYCREW_VENV_DIR)",
            python=str(found.python),
        )

    def look(self, key: str) -> Environment | None:
        """A published environment with its stamp, or None, without becoming its user."""
        try:
            stamp = json.loads((self.root / key / STAMP).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return Environment(key, self.root / key, stamp)

    def environments(self) -> list[Environment]:
        """All published environments, the newest first."""
        names = sorted(p.parent.name for p in self.root.glob(f"*/{STAMP}"))
        found = [e for e in map(self.look, names) if e is not None]
        return sorted(found, key=lambda e: str(e.stamp.get("created")), reverse=True)

    def recipe(self, key: str) -> Recipe | None:
        """The recipe that was kept for a key, or None."""
        try:
            return Recipe.from_bytes(self._recipe_file(key).read_bytes())
        except (FileNotFoundError, PermissionError, zipfile.BadZipFile, KeyError):
            return None

    def install(
        self,
        key: str,
        make: Callable[[], Recipe],
        *,
        python: str | None = None,
        sync: Sync | None = None,
        force: bool = False,
        report: Report = silent,
    ) -> Environment:
        """The environment of a key, built if it is not there.

        However many callers ask, in however many processes, one builds and the others wait.

        Args:
            key: The digest.
            make: Gives the recipe; called only by the one that builds.
            python: Version or path of its interpreter; None for the one that runs this.
            sync: How uv installs it without the recipe, if it can.
            force: Build it anew even if it is there.
            report: Told what is going on.

        Raises:
            UvError: uv failed; nothing was published.
            ProbeError: The environment was built, but does not work; nothing was published.
            StoreError: The store cannot be written to, or another process did not end in time.
            DiskFullError: No space is left.
        """
        if not force and (found := self.get(key)):
            return self.on_this_machine(found)
        if not force:
            self._refuse_to_replace(key)
        self.need_writable(key)
        try:
            return self.on_this_machine(self._install(key, make, python, sync, force, report))
        except errors.VenvError:  # some of them are timeouts, and so OSErrors
            raise
        except OSError as error:
            raise errors.of_store(error, self.root / key) from error

    def _install(
        self,
        key: str,
        make: Callable[[], Recipe],
        python: str | None,
        sync: Sync | None,
        force: bool,
        report: Report,
    ) -> Environment:
        asked = datetime.now(UTC).isoformat()
        locks = self.locks(key)

        def published() -> bool:
            return not force and self.get(key) is not None

        with locks.building(self.build_timeout_s, report, published) as held:
            found = self.get(key)
            if found and (not force or str(found.stamp.get("created")) > asked):
                return found
            if held is None:  # published a moment ago, and removed since
                return self._install(key, make, python, sync, force, report)
            users = self.users(self.root / key) if found else Users()
            locks.release()
            tell = _teller(locks, report)
            try:
                with locks.unused() as free, slot(locks.folder, self.max_builds, self.build_timeout_s, tell):
                    if users or not free:
                        who = f" by {users}" if users else ""
                        raise errors.EnvironmentInUseError(
                            f"{self.root / key} is in use{who}: it cannot be replaced"
                        )
                    entry, timeout_s = self.root / key, self.build_timeout_s
                    build = Build(entry, python, sync, self.environ, held, tell, timeout_s)
                    built = self._run(key, build, make)
            finally:
                locks.tell(None)
            locks.use()
            return built

    def keep_recipe(self, recipe: Recipe) -> None:
        """Keep a recipe, in one piece; for its owner only, as indexes may be named with a password.

        Raises:
            StoreError: It cannot be written.
            DiskFullError: No space is left.
        """
        path = self._recipe_file(recipe.key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, recipe.to_bytes(), mode=0o600)
        except OSError as error:
            raise errors.of_store(error, path) from error

    def name(self, alias: str, key: str) -> None:
        """Give an environment a readable name: a link in `by-name`.

        Raises:
            SpecError: The name is not a plain file name.
        """
        check_name(alias)
        link = self.root / NAMES / alias
        target = Path("..", key, "venv")
        with contextlib.suppress(OSError):
            if link.readlink() == target:
                return
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            fresh = link.with_name(f".{alias[:100]}.{uuid.uuid4().hex}")
            fresh.symlink_to(target)
            fresh.replace(link)
        except OSError as error:  # a read-only store works without names
            logger.debug("%s was not named %s: %s", key, alias, error)

    def forget(self, key: str) -> None:
        """Drop the recipe of a key."""
        self._recipe_file(key).unlink(missing_ok=True)

    def _recipe_file(self, key: str) -> Path:
        return self.root / "recipes" / f"{key}.zip"

    def need_writable(self, key: str) -> None:
        """Make sure that an environment can be built here.

        Raises:
            ReadOnlyStoreError: It cannot.
            DiskFullError: No space is left.
        """
        try:
            (self.root / "locks").mkdir(parents=True, exist_ok=True)
            writable = os.access(self.root, os.W_OK)
        except OSError as error:
            if isinstance(full := errors.of_store(error, self.root), errors.DiskFullError):
                raise full from error
            raise errors.ReadOnlyStoreError(
                f"the store {self.root} cannot be made: {error}; RAYCREW_VENV_DIR names another folder"
            ) from error
        if not writable:
            raise errors.ReadOnlyStoreError(
                f"environment {key} is not in {self.root}, and that cannot be written to; build it there "
                "with an account that may (`python -m raycrew.venv_manager prefetch`), or name "
                "another folder in RAYCREW_VENV_DIR"
            )

    def users(self, entry: Path) -> Users:
        """The processes of this machine that run from an environment, by whatever name."""
        return processes_using(entry, self.root / NAMES)

    def locks(self, key: str) -> KeyLocks:
        """The locks of one environment."""
        return KeyLocks(self.root / "locks", key)

    def _run(self, key: str, build: Build, make: Callable[[], Recipe]) -> Environment:
        entry = build.entry
        try:
            self.remove_folder(entry)
            build.tell("choosing versions")
            stamp = build.run(make)
            if build.sync and build.recipe:  # kept only now that uv has found the lock to fit
                self.keep_recipe(build.recipe)
            write_whole(entry / STAMP, json.dumps(stamp, indent=1).encode(), sync=True)
            build.tell(
                f"done: {stamp['size_bytes'] / 1e6:.0f} MB, {stamp['own_bytes'] / 1e6:.0f} MB of it new"
            )
            return Environment(key, entry, stamp)
        except BaseException:
            self.remove_folder(entry)
            raise

    def remove_folder(self, entry: Path) -> None:
        """Take a folder out of the store: its stamp first, then out of sight, then away."""
        (entry / STAMP).unlink(missing_ok=True)
        if not entry.exists():
            return
        trash = self.root / "trash" / f"{entry.name}-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError):  # a full disk may have no room for the other folder
            trash.parent.mkdir(exist_ok=True)
            entry.rename(trash)
            entry = trash
        shutil.rmtree(entry, ignore_errors=True)


def check_name(alias: str) -> None:
    """Refuse what cannot be a readable name of an environment.

    Raises:
        SpecError: It is not a plain file name.
    """
    if not alias or alias != Path(alias).name or alias.startswith("."):
        raise errors.SpecError(f"{alias!r} is not a name for an environment: it must be a plain file name")


def _teller(locks: KeyLocks, report: Report) -> Report:
    """Tell the caller, and those who wait for it, what is new."""

    def tell(text: str) -> None:
        report(text)
        locks.tell(text)

    return changes(tell)
