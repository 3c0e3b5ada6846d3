"""The store: one folder per key, built in place, published by a stamp that is written last."""

import contextlib
import errno
import json
import logging
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raycrew.venv_manager import _inventory, _lock, _probe, errors
from raycrew.venv_manager._indexes import build_environment
from raycrew.venv_manager._locks import KeyLocks, processes_using, slot
from raycrew.venv_manager._progress import Report, silent
from raycrew.venv_manager._recipe import Recipe, this_platform
from raycrew.venv_manager._spec import EnvironmentSpec
from raycrew.venv_manager._uv import find_uv, run_uv

logger = logging.getLogger(__name__)

STAMP = "stamp.json"
_PYTHON = Path("venv", "bin", "python")


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
        return self.path / _PYTHON


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

    def python(self, key: str) -> Path | None:
        """Path of a published environment's interpreter, or None. Reads nothing but the folder."""
        entry = self.root / key
        if (entry / STAMP).exists() and os.access(entry / _PYTHON, os.X_OK):
            return entry / _PYTHON
        return None

    def get(self, key: str) -> Environment | None:
        """A published environment with its stamp, or None; this process counts as its user from now on."""
        if self.python(key) is None or not self.locks(key).use() or self.python(key) is None:
            return None
        return self.look(key)

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
        except FileNotFoundError:
            return None

    def install(
        self, key: str, make: Callable[[], Recipe], *, force: bool = False, report: Report = silent
    ) -> Environment:
        """The environment of a key, built if it is not there.

        However many callers ask, in however many processes, one builds and the others wait.

        Args:
            key: The digest.
            make: Gives the recipe; called only by the one that builds.
            force: Build it anew even if it is there.
            report: Told what is going on.

        Raises:
            UvError: uv failed; nothing was published.
            ProbeError: The environment was built, but does not work; nothing was published.
            StoreError: The store cannot be written to, or another process did not end in time.
        """
        asked = datetime.now(UTC).isoformat()
        if not force and (found := self.get(key)):
            return found
        self._need_writable(key)
        locks = self.locks(key)
        with locks.building(self.build_timeout_s, report) as held:
            found = self.get(key)
            if found and (not force or str(found.stamp.get("created")) > asked):
                return found
            users = processes_using(self.root / key) if found else []
            locks.release()
            with locks.unused() as free, slot(locks.folder, self.max_builds, self.build_timeout_s, report):
                if users or not free:
                    who = f" by process {', '.join(map(str, users))}" if users else ""
                    raise errors.EnvironmentInUseError(
                        f"{self.root / key} is in use{who}: it cannot be replaced"
                    )
                built = self._build(key, make, held, report)
            locks.use()
            return built

    def keep_recipe(self, recipe: Recipe) -> None:
        """Keep a recipe, in one piece."""
        path = self._recipe_file(recipe.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, recipe.to_bytes())

    def name(self, alias: str, key: str) -> None:
        """Give an environment a readable name: a link in `by-name`."""
        if not alias or alias != Path(alias).name or alias.startswith("."):
            raise ValueError(f"{alias!r} is not a name for an environment: it must be a plain file name")
        link = self.root / "by-name" / alias
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

    def _need_writable(self, key: str) -> None:
        try:
            (self.root / "locks").mkdir(parents=True, exist_ok=True)
            writable = os.access(self.root, os.W_OK)
        except OSError as error:
            raise errors.ReadOnlyStoreError(
                f"the store {self.root} cannot be made: {error}; RAYCREW_VENV_DIR names another folder"
            ) from error
        if not writable:
            raise errors.ReadOnlyStoreError(
                f"environment {key} is not in {self.root}, and that cannot be written to; build it there "
                "with an account that may (`python -m raycrew.venv_manager prefetch`), or name "
                "another folder in RAYCREW_VENV_DIR"
            )

    def locks(self, key: str) -> KeyLocks:
        """The locks of one environment."""
        return KeyLocks(self.root / "locks", key)

    def _build(self, key: str, make: Callable[[], Recipe], held: int, report: Report) -> Environment:
        entry = self.root / key
        locks = self.locks(key)

        def tell(text: str) -> None:
            report(text)
            locks.tell(text)

        try:
            self.remove_folder(entry)
            clock = _Clock()
            tell("choosing versions")
            recipe = make()
            clock.lap("resolve_s")
            return self._build_in(entry, recipe, held, tell, clock)
        except errors.VenvError:  # some of them are timeouts, and so OSErrors
            self.remove_folder(entry)
            raise
        except OSError as error:
            self.remove_folder(entry)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise errors.DiskFullError(
                    f"no space is left for {entry}: {error}; `python -m raycrew.venv_manager gc` frees some"
                ) from error
            raise errors.StoreError(f"{entry} cannot be built: {error}") from error
        except BaseException:
            self.remove_folder(entry)
            raise
        finally:
            locks.tell(None)

    def _build_in(self, entry: Path, recipe: Recipe, held: int, tell: Report, clock: "_Clock") -> Environment:
        if recipe.platform != this_platform():
            raise errors.StoreError(
                f"the versions of {recipe.key} were chosen for {recipe.platform}, this is {this_platform()}: "
                "nodes of another kind need environments of their own"
            )
        _lay_out(entry, recipe)
        environ = self._uv_environment(entry, recipe)
        uv = find_uv(environ)
        python = recipe.python or sys.executable

        def follow(line: str) -> None:
            if not line.startswith((" + ", "Using Python")):
                tell(line)

        def run(*arguments: str | Path) -> None:
            run_uv(
                arguments, environ=environ, cwd=entry, on_line=follow, timeout_s=self.build_timeout_s,
                pass_fds=(held,), uv=uv,
            )  # fmt: skip

        tell("making the environment")
        run("venv", "-q", "--no-project", "--python", python, entry / "venv")
        clock.lap("venv_s")
        run(
            "pip",
            "install",
            "--preview-features",
            "pylock",
            "--python",
            entry / _PYTHON,
            "-r",
            entry / "pylock.toml",
        )
        clock.lap("install_s")
        tell("checking the files")
        inventory = _inventory.take(entry / "venv")
        target = _lock.target(recipe.python)
        expected = {
            p.name: str(p.data["version"]) for p in _lock.read(recipe.lock) if p.pin and p.applies(target)
        }
        if missing := _inventory.absent(inventory.packages, expected):
            raise errors.StoreError(f"{entry} came out incomplete: " + "; ".join(missing[:10]))
        clock.lap("inventory_s")
        tell(
            "importing " + ", ".join(recipe.expectation.imports)
            if recipe.expectation.imports
            else "starting it"
        )
        probed = _probe.probe(entry / _PYTHON, recipe.expectation.imports)
        _probe.check(probed, recipe.expectation)
        clock.lap("probe_s")
        write_whole(entry / "inventory.json", json.dumps(inventory.files).encode())
        stamp = {
            "key": recipe.key,
            "created": datetime.now(UTC).isoformat(),
            "spec": dict(recipe.spec),
            "label": str(EnvironmentSpec.from_dict(recipe.spec)),
            "identity": dict(recipe.identity),
            "python": ".".join(map(str, probed.version)),
            "packages": inventory.packages,
            "size_bytes": inventory.size_bytes,
            "own_bytes": inventory.own_bytes,
            "link_mode": inventory.link_mode,
            "seconds": clock.laps,
        }
        write_whole(entry / STAMP, json.dumps(stamp, indent=1).encode())
        tell(f"done: {inventory.size_bytes / 1e6:.0f} MB, {inventory.own_bytes / 1e6:.0f} MB of it new "
             f"({inventory.link_mode})")  # fmt: skip
        return Environment(recipe.key, entry, stamp)

    def _uv_environment(self, entry: Path, recipe: Recipe) -> dict[str, str]:
        spec = EnvironmentSpec.from_dict(recipe.spec)
        base = {k: v for k, v in build_environment(spec, self.environ).items() if k not in _INDEX_VARIABLES}
        return base | dict(recipe.variables) | {"UV_CONFIG_FILE": str(entry / "uv.toml"), "UV_NO_CONFIG": "1"}

    def remove_folder(self, entry: Path) -> None:
        """Take a folder out of the store: its stamp first, then out of sight, then away."""
        (entry / STAMP).unlink(missing_ok=True)
        if not entry.exists():
            return
        trash = self.root / "trash" / f"{entry.name}-{uuid.uuid4().hex[:8]}"
        trash.parent.mkdir(exist_ok=True)
        entry.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_STRATEGY", "UV_FIND_LINKS")


class _Clock:
    """Seconds of each step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(now - self._last, 3)
        self._last = now


def _lay_out(entry: Path, recipe: Recipe) -> None:
    (entry / "wheels").mkdir(parents=True)
    (entry / "uv.toml").write_text(recipe.settings, encoding="utf-8")
    (entry / "pylock.toml").write_text(recipe.lock, encoding="utf-8")
    for name, content in recipe.wheels.items():
        (entry / "wheels" / name).write_bytes(content)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, power cuts included."""
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
