"""From a spec to an interpreter on this machine."""

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from raycrew.venv_manager import _spec
from raycrew.venv_manager._build import Luggage, Recipe, check, luggage, probe
from raycrew.venv_manager._spec import EnvironmentSpec, lock_file
from raycrew.venv_manager._store import (
    Environment,
    Store,
    check_name,
    expectation,
    recipe_variables,
    resolve,
    secrets_of,
    sync_of,
)
from raycrew.venv_manager._uv import build_environment, configured, parse, uv_version
from raycrew.venv_manager._waiting import Report, reporting
from raycrew.venv_manager.errors import UvNotFoundError

logger = logging.getLogger(__name__)


def identify(spec: EnvironmentSpec, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Everything that decides what a spec's environment holds, on this machine and for this driver."""
    carried = _luggage(spec).identity() if spec.carry else {}
    return _spec.identity(
        spec, build_environment(spec, environ), carried, partial(_uv_version, environ), configured(environ)
    )


def ensure(
    spec: EnvironmentSpec | str | Path,
    *,
    store: Store | None = None,
    force_rebuild: bool = False,
    upgrade: bool = False,
) -> Environment:
    """The environment of a spec on this machine, built if it is not there.

    Versions that no lock file decides are chosen once; they stay until an upgrade is asked for.

    Args:
        spec: A spec, or what `parse` understands.
        store: Where environments lie; the default store if left out.
        force_rebuild: Choose versions and build anew even if it is there.
        upgrade: Choose versions anew, and build anew if others came out.

    Raises:
        SpecError: The spec makes no sense; nothing was started.
        VenvError: It could not be built; nothing was published.
    """
    store = store or Store()
    spec = parse(spec)
    identity = identify(spec, store.environ)
    key = _spec.key_of(identity)
    force = force_rebuild or forced(store.environ)
    choose = force
    if upgrade and not force and lock_file(spec) is None:  # what is chosen here is kept, and installed below
        force = not prepare(spec, store, force=True).made(store.root / key)
    if not force and (found := store.get(key)):
        return store.on_this_machine(found)
    with reporting(_title(spec, key)) as report:
        sync = sync_of(spec, _luggage(spec), store.environ)
        make = partial(_recipe, spec, key, identity, store, choose, report, synced=sync is not None)
        return store.install(key, make, python=spec.python, sync=sync, force=force, report=report)


def prepare(spec: EnvironmentSpec | str | Path, store: Store, *, force: bool = False) -> Recipe:
    """Choose a spec's versions, once, and keep them in the store; nothing is installed.

    Raises:
        SpecError: The spec makes no sense.
        StoreError: The store cannot be written to.
        UvError: There is no set of versions, or a local source does not build.
    """
    spec = parse(spec)
    identity = identify(spec, store.environ)
    key = _spec.key_of(identity)
    with reporting(_title(spec, key)) as report:
        return _recipe(spec, key, identity, store, force, report)


def _recipe(
    spec: EnvironmentSpec, key: str, identity: Mapping[str, Any], store: Store, force: bool, report: Report,
    *, synced: bool = False,
) -> Recipe:  # fmt: skip
    """The recipe that was kept, else a new one: an environment that is built again has the same versions.

    Beside a sync, the new one is not kept yet: that run of uv has still to find the lock to fit.
    """
    if not force and (kept := store.recipe(key)) is not None:  # how files come there may differ, not which
        return dataclasses.replace(
            kept,
            variables=recipe_variables(spec, store.environ),
            secrets=secrets_of(spec, store.environ),
        )
    store.need_writable(key)
    made = resolve(
        spec, key, identity, _luggage(spec), environ=store.environ,
        on_line=report, timeout_s=store.build_timeout_s, checked=synced,
    )  # fmt: skip
    if not synced:
        store.keep_recipe(made)
    return made


def _luggage(spec: EnvironmentSpec) -> Luggage:
    return luggage() if spec.carry else Luggage()


def _title(spec: EnvironmentSpec, key: str) -> str:
    return f"environment {key[:8]} ({Path(spec.path).name or spec.kind})"


def forced(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for everything to be built anew."""
    return environ.get("RAYCREW_FORCE_REBUILD_VENVS", "").lower() in ("1", "true", "yes")


def create_local_venv(
    py_executable: str | EnvironmentSpec, venv_name: str, force_rebuild: bool = False
) -> str:
    """Path of the Python of an environment on this machine.

    Args:
        py_executable: `"uv run --locked --extra vllm --directory D"` or any other `uv run` form, the folder
            of a project, a requirements file, or the path of an interpreter, returned once it was probed.
        venv_name: A readable name for it; environments of equal content are shared whatever their names.
        force_rebuild: Choose versions and build anew even if it is there.

    Raises:
        SpecError: `py_executable` is none of these, or the name is not a plain file name.
        VenvError: It could not be built; nothing was published.
    """
    check_name(venv_name)
    spec = parse(py_executable)
    if spec.kind == "interpreter":
        return checked_interpreter(spec.path)
    store = Store()
    environment = ensure(spec, store=store, force_rebuild=force_rebuild)
    store.name(venv_name, environment.key)
    return str(environment.python)


def checked_interpreter(path: str) -> str:
    """The same path, once the interpreter there was found to run this driver's workers.

    Raises:
        ProbeError: It does not exist, does not run, or does not fit.
    """
    if Path(path) != Path(sys.executable):
        expected = expectation(EnvironmentSpec.interpreter(path), luggage())
        check(probe(path, expected.imports), expected)
    return path


def _uv_version(environ: Mapping[str, str]) -> str | None:
    try:
        return uv_version(environ)
    except UvNotFoundError:  # what is there already can be used without one
        return None
