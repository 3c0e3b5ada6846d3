"""One build: an interpreter, the packages of a lock, and proof that both are there and work."""

import json
import os
import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raycrew.venv_manager import _spec
from raycrew.venv_manager._spec import EnvironmentSpec
from raycrew.venv_manager._store.building import inventory as _inventory
from raycrew.venv_manager._store.building import probing as _probe
from raycrew.venv_manager._store.building.recipe import Recipe, this_platform
from raycrew.venv_manager._uv import access_here, build_environment, find_uv, need_credentials, run_uv
from raycrew.venv_manager._waiting import Report, result_of, workers
from raycrew.venv_manager.errors import StoreError

VENV = "venv"
PYTHON = Path(VENV, "bin", "python")


@dataclass(frozen=True, slots=True)
class Sync:
    """How uv installs a locked project by itself, which is the fastest way where nothing else is wanted.

    Attributes:
        words: Arguments of uv.
        settings: A `uv.toml`.
        environ: The whole environment of uv.
        need_same: Raises an error if the project has changed since the environment's key was taken.
    """

    words: tuple[str, ...]
    settings: str
    environ: Mapping[str, str]
    need_same: Callable[[], None] = lambda: None


@dataclass
class Build:
    """The making of one environment in an empty folder.

    Attributes:
        entry: The folder.
        python: Version or path of the interpreter; None for the one that runs this.
        sync: How uv installs it without the recipe, if it can.
        environ: Environment of the calling process.
        held: A locked descriptor, which all that the build starts inherits.
        tell: Told what is going on.
        timeout_s: Deadline of each run of uv.
        recipe: What it was made from, once that is known.
        expected: The packages of its lock that are installed here, with their versions.
        seconds: What each step took.
    """

    entry: Path
    python: str | None
    sync: Sync | None
    environ: Mapping[str, str]
    held: int
    tell: Report
    timeout_s: float
    recipe: Recipe | None = None
    expected: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, make: Callable[[], Recipe]) -> dict[str, Any]:
        """Make it; returns what its stamp says.

        Raises:
            UvError: uv failed.
            ProbeError: The interpreter does not work, or does not fit the driver.
            StoreError: Packages of the lock are not there.
        """
        self.entry.mkdir(0o755, parents=True)
        with workers(1) as beside:
            recipe = self._synced(self.sync, make, beside) if self.sync else self._from_recipe(make, beside)
            self.recipe = recipe
            probing = beside.submit(self._probe, recipe)
            with self._timed("inventory_s"):
                inventory = self._take_inventory()
            probed = result_of(probing)
        return {
            "key": recipe.key,
            "path": str(self.entry),
            "created": datetime.now(UTC).isoformat(),
            "spec": dict(recipe.spec),
            "label": str(EnvironmentSpec.from_dict(recipe.spec)),
            "identity": dict(recipe.identity),
            "expectation": recipe.expectation.to_list(),
            "host": platform.node(),
            "python": ".".join(map(str, probed.version)),
            "packages": inventory.packages,
            "size_bytes": inventory.size_bytes,
            "own_bytes": inventory.own_bytes,
            "link_mode": inventory.link_mode,
            "seconds": self.seconds,
        }

    def _from_recipe(self, make: Callable[[], Recipe], beside: Executor) -> Recipe:
        with self._timed("resolve_s"):
            made = beside.submit(self._make_interpreter)
            recipe = make()
            result_of(made)
        if recipe.platform != this_platform():
            raise StoreError(
                f"the versions of {recipe.key} were chosen for {recipe.platform}, this is {this_platform()}: "
                "nodes of another kind need environments of their own"
            )
        expecting = beside.submit(self._expect, recipe)
        with self._timed("install_s"):
            self._keep(recipe)
            self._install(recipe)
            result_of(expecting)
        return recipe

    def _synced(self, sync: Sync, make: Callable[[], Recipe], beside: Executor) -> Recipe:
        made = beside.submit(make)
        with self._timed("install_s"):
            write_whole(self.entry / "uv.toml", sync.settings.encode())
            where = {
                "UV_PROJECT_ENVIRONMENT": str(self.entry / VENV),
                "UV_CONFIG_FILE": str(self.entry / "uv.toml"),
                "UV_NO_CONFIG": "1",
            }
            self._uv({**sync.environ, **where}, *sync.words)
        with self._timed("resolve_s"):
            recipe = self._expect(result_of(made))
            sync.need_same()
            self._keep(recipe)
        return recipe

    def _expect(self, recipe: Recipe) -> Recipe:
        def target() -> Mapping[str, str]:
            return _spec.markers_of(self.entry / VENV)

        pinned = (p for p in _spec.read_lock(recipe.lock) if p.pin and p.applies(target))
        self.expected = {p.name: str(p.data["version"]) for p in pinned}
        return recipe

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)

    def _uv(self, environ: Mapping[str, str], *arguments: str | Path) -> None:
        def follow(line: str) -> None:
            if not line.startswith((" + ", "Using Python")):
                self.tell(line.strip())

        run_uv(
            arguments, environ=environ, cwd=self.entry, on_line=follow, timeout_s=self.timeout_s,
            pass_fds=(self.held,), uv=find_uv(environ),
        )  # fmt: skip

    def _make_interpreter(self) -> None:
        spec = EnvironmentSpec("project")
        environ = build_environment(spec, self.environ) | {"UV_NO_CONFIG": "1"}
        self._uv(
            environ,
            "venv",
            "-q",
            "--no-project",
            "--python",
            self.python or sys.executable,
            self.entry / VENV,
        )

    def _keep(self, recipe: Recipe) -> None:
        (self.entry / "wheels").mkdir(0o755)
        write_whole(self.entry / "uv.toml", recipe.settings.encode())
        write_whole(self.entry / "pylock.toml", recipe.lock.encode())
        for name, content in recipe.wheels.items():
            write_whole(self.entry / "wheels" / name, content)

    def _install(self, recipe: Recipe) -> None:
        spec = EnvironmentSpec.from_dict(recipe.spec)
        own = build_environment(spec, self.environ) | access_here(self.environ)
        need_credentials(recipe.credentials, own | dict(recipe.secrets))
        kept = {k: v for k, v in own.items() if not (k.startswith("UV_") and _spec.counts(k))}
        environ = kept | dict(recipe.variables) | dict(recipe.secrets)
        environ |= {"UV_CONFIG_FILE": str(self.entry / "uv.toml"), "UV_NO_CONFIG": "1"}
        self._uv(
            environ, "pip", "install", "--preview-features", "pylock", "--python", self.entry / PYTHON,
            "-r", self.entry / "pylock.toml",
        )  # fmt: skip

    def _take_inventory(self) -> _inventory.Inventory:
        found = _inventory.take(self.entry / VENV)
        if missing := _inventory.absent(found.packages, self.expected):
            raise StoreError(f"{self.entry} came out incomplete: " + "; ".join(missing[:10]))
        write_whole(self.entry / "inventory.json", json.dumps(found.files).encode())
        return found

    def _probe(self, recipe: Recipe) -> _probe.Probe:
        imports = recipe.expectation.imports
        self.tell("importing " + ", ".join(imports) if imports else "starting its interpreter")
        with self._timed("probe_s"):
            found = _probe.probe(self.entry / PYTHON, imports, environ=self.environ, pass_fds=(self.held,))
        _probe.check(found, recipe.expectation)
        return found


def write_whole(path: Path, content: bytes, *, sync: bool = False, mode: int = 0o644) -> None:
    """Write a file so that it is there whole or not at all; with `sync` even after a power cut."""
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if sync:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
