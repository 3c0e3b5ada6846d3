"""The store: one folder per key, built in place, published by a stamp that is written last."""

import contextlib
import json
import logging
import os
import platform
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path

from raycrew.venv_manager import errors
from raycrew.venv_manager._store.building import Build, Expectation, Recipe, Sync, check, probe, write_whole
from raycrew.venv_manager._store.root import make_folder
from raycrew.venv_manager._store.shelf import NAMES, Shelf
from raycrew.venv_manager._store.stamps import STAMP, Environment
from raycrew.venv_manager._waiting import Report, Users, silent, slot

logger = logging.getLogger(__name__)


class Store(Shelf):
    """Environments in one folder.

    Args:
        root: The folder; `default_root` if left out.
        environ: Environment that uv runs in.
        build_timeout_s: Deadline of each run of uv, and of waiting for another process's build.
        max_builds: Environments that are built at the same time on one machine.
        trusted_owners: Users, and groups as `@team`, that may own and write the store, beside this user and
            root; those of `RAYCREW_VENV_TRUSTED_OWNERS` (separated by commas) may, too.

    Raises:
        SpecError: Nothing says where the store is, or this machine does not know one of those owners; or the
            deadline is no time, or nothing could be built at the same time.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        build_timeout_s: float = 3600.0,
        max_builds: int = 2,
        trusted_owners: Collection[str] = (),
    ) -> None:
        if not build_timeout_s >= 0:
            raise errors.SpecError(f"build_timeout_s is {build_timeout_s}; it is a time of at least 0")
        if not max_builds >= 1:
            raise errors.SpecError(f"max_builds is {max_builds}: at least one environment is built at a time")
        super().__init__(root, environ, trusted_owners)
        self.build_timeout_s = build_timeout_s
        self.max_builds = max_builds
        self._probed: set[Path] = set()

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
            mark.parent.mkdir(0o755, exist_ok=True)
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

    def install(
        self,
        key: str,
        make: Callable[[], Recipe],
        *,
        python: str | None = None,
        sync: Sync | None = None,
        force: bool = False,
        token: str = "",
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
            token: Names one rebuild that several ask for; what was built for it is not built again.
            report: Told what is going on.

        Raises:
            UvError: uv failed; nothing was published.
            ProbeError: The environment was built, but does not work; nothing was published.
            StoreError: The store cannot be written to, or another process did not end in time.
            DiskFullError: No space is left.
        """
        is_done = not force or _is_of(
            self.look(key), token
        )  # a user that waits to build would stop the others
        if is_done and (found := self.get(key)):
            return self.on_this_machine(found)
        if not force:
            self._refuse_to_replace(key)
        self.need_writable(key)
        try:
            return self.on_this_machine(self._install(key, make, python, sync, force, token, report))
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
        token: str,
        report: Report,
    ) -> Environment:
        asked = datetime.now(UTC).isoformat()
        locks = self.locks(key)

        def published() -> bool:
            return not force and self.get(key) is not None

        with locks.building(self.build_timeout_s, report, published) as held:
            found = self.get(key)
            if found and (not force or _is_of(found, token) or str(found.stamp.get("created")) > asked):
                return found
            if held is None:  # published a moment ago, and removed since
                return self._install(key, make, python, sync, force, token, report)
            try:
                return self._rebuilt(key, make, python, sync, held, token, report)
            finally:
                if self._is_there(key):  # also where it was not replaced: whoever asked uses it as before
                    locks.use()

    def _rebuilt(
        self, key: str, make: Callable[[], Recipe], python: str | None, sync: Sync | None, held: int,
        token: str, report: Report,
    ) -> Environment:  # fmt: skip
        entry, locks, timeout_s = self.root / key, self.locks(key), self.build_timeout_s
        users = self.users(entry) if entry.exists() else Users()
        locks.release()
        with (
            locks.telling(report) as tell,
            locks.unused() as free,
            slot(locks.folder, self.max_builds, timeout_s, tell),
        ):
            if users or not free:
                who = f" by {users}" if users else ""
                raise errors.EnvironmentInUseError(f"{entry} is in use{who}: it cannot be replaced")
            build = Build(entry, python, sync, self.environ, held, tell, timeout_s)
            return self._run(key, build, make, token)

    def keep_recipe(self, recipe: Recipe) -> None:
        """Keep a recipe, in one piece; for its owner only, as indexes may be named with a password.

        Raises:
            StoreError: It cannot be written.
            DiskFullError: No space is left.
        """
        path = self.recipe_file(recipe.key)
        try:
            make_folder(self.root, path.parent.name)
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
            make_folder(self.root, NAMES)
            fresh = link.with_name(f".{alias[:100]}.{uuid.uuid4().hex}")
            fresh.symlink_to(target)
            fresh.replace(link)
        except OSError as error:  # a read-only store works without names
            logger.debug("%s was not named %s: %s", key, alias, error)

    def forget(self, key: str) -> None:
        """Drop the recipe of a key."""
        self.recipe_file(key).unlink(missing_ok=True)

    def need_writable(self, key: str) -> None:
        """Make sure that an environment can be built here.

        Raises:
            ReadOnlyStoreError: It cannot.
            UntrustedStoreError: Others than trusted users may write here.
            DiskFullError: No space is left.
        """
        try:
            self.check()
            make_folder(self.root, "locks")
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
                "with an account that may (`raycrew-env prefetch`), or name "
                "another folder in RAYCREW_VENV_DIR"
            )

    def _run(self, key: str, build: Build, make: Callable[[], Recipe], token: str) -> Environment:
        entry = build.entry
        try:
            self.remove_folder(entry)
            build.tell("making its interpreter")
            stamp = build.run(make) | {"token": token}
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
            make_folder(self.root, trash.parent.name)
            entry.rename(trash)
            entry = trash
        shutil.rmtree(entry, ignore_errors=True)


def _is_of(found: Environment | None, token: str) -> bool:
    """Whether an environment was built for a rebuild."""
    return found is not None and bool(token) and found.stamp.get("token") == token


def check_name(alias: str) -> None:
    """Refuse what cannot be a readable name of an environment.

    Raises:
        SpecError: It is not a plain file name.
    """
    if not alias or alias != Path(alias).name or alias.startswith("."):
        raise errors.SpecError(f"{alias!r} is not a name for an environment: it must be a plain file name")
