"""From a spec to an interpreter on this machine."""

import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from raycrew.venv_manager import _spec
from raycrew.venv_manager._spec import EnvironmentSpec
from raycrew.venv_manager._store import Environment, Recipe, Store, check, check_name, luggage, probe
from raycrew.venv_manager._uv import build_environment, configured, parse
from raycrew.venv_manager._waiting import PerProcess, reporting
from raycrew.venv_manager.errors import InputsChangedError
from raycrew.venv_manager.provision._resolving import Request, expectation

logger = logging.getLogger(__name__)

T = TypeVar("T")
_TRIES = 3
# As a variable asks: the name of each rebuild, and those whose versions were chosen.
_rebuilds: dict[tuple[Path, EnvironmentSpec], str] = {}
_chosen: set[tuple[Path, EnvironmentSpec]] = set()
_guard = PerProcess(threading.Lock)


def identify(spec: EnvironmentSpec, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Everything that decides what a spec's environment holds, on this machine and for this driver.

    That is what can be told without choosing versions and without building local sources.
    """
    given = luggage().identity() if spec.carry else {}
    return _spec.asked(spec, build_environment(spec, environ), given, configured(environ))


def identity_of(spec: EnvironmentSpec, store: Store) -> dict[str, Any]:
    """What the key of a spec's environment is taken of, where its versions are chosen; else what is asked."""
    request = Request(spec, store)
    return request.known() or request.asked


def published_key(spec: EnvironmentSpec, store: Store) -> str | None:
    """The key of a spec's environment, where its versions are chosen and its sources built."""
    known = Request(spec, store).known()
    return None if known is None else _spec.key_of(known)


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
        upgrade: Choose versions anew; what then is another environment is built beside the one before.

    Raises:
        SpecError: The spec makes no sense; nothing was started.
        InputsChangedError: What it is made from changed each time while it was made.
        VenvError: It could not be built; nothing was published.
    """
    store = store or Store()
    spec = parse(spec)
    with rebuilding(spec, store, force_rebuild) as (force, token):
        return _while_inputs_stay(partial(_ensured, spec, store, force, token, upgrade))


def _ensured(spec: EnvironmentSpec, store: Store, force: bool, token: str, upgrade: bool) -> Environment:
    request = Request(spec, store)
    if not (force or upgrade) and (found := _published(request.known(), store)):
        return found
    with reporting(_title(spec)) as report:
        identity = request.identity(report, anew=force or upgrade)
        if not force and (found := _published(identity, store)):
            return found
        make = partial(request.recipe, identity, report, synced=request.by_lock)
        key = _spec.key_of(identity)
        return store.install(
            key, make, python=spec.python, sync=request.sync, force=force, token=token, report=report
        )


def _published(identity: Mapping[str, Any] | None, store: Store) -> Environment | None:
    found = None if identity is None else store.get(_spec.key_of(identity))
    return None if found is None else store.on_this_machine(found)


def prepare(spec: EnvironmentSpec | str | Path, store: Store, *, force: bool = False) -> Recipe:
    """Choose a spec's versions, once, and keep them in the store; nothing is installed.

    Args:
        spec: A spec, or what `parse` understands.
        store: Where they are kept.
        force: Choose them even if that was done before.

    Raises:
        SpecError: The spec makes no sense.
        StoreError: The store cannot be written to.
        UvError: There is no set of versions, or a local source does not build.
    """
    return _while_inputs_stay(partial(_prepared, parse(spec), store, force))


def _prepared(spec: EnvironmentSpec, store: Store, force: bool) -> Recipe:
    request = Request(spec, store)
    with reporting(_title(spec)) as report:
        return request.recipe(request.identity(report, anew=force), report)


def _while_inputs_stay(work: Callable[[], T]) -> T:
    """What some work comes to; it is begun anew, some times, where what it works from changed meanwhile.

    Raises:
        InputsChangedError: It changed each time.
    """
    for _ in range(_TRIES - 1):
        try:
            return work()
        except InputsChangedError as error:
            logger.info("begun anew: %s", error)
    return work()


def _title(spec: EnvironmentSpec) -> str:
    return f"environment of {Path(spec.path).name or spec.kind}"


@contextmanager
def rebuilding(spec: EnvironmentSpec, store: Store, asked: bool) -> Iterator[tuple[bool, str]]:
    """Whether versions are chosen anew, and the name of the rebuild that environments are built for, or "".

    Both where a rebuild is asked for, and where a variable says so. The variable means one in a process
    for each environment: what all its workers run in is not built for each of them. Nodes are told its name
    each time, as they may have disks of their own.
    """
    if asked or not _said(store.environ):
        yield asked, uuid.uuid4().hex if asked else ""
        return
    what = (store.root, spec)
    with _guard.here:
        token = _rebuilds.setdefault(what, uuid.uuid4().hex)
    yield what not in _chosen, token
    _chosen.add(what)


def _said(environ: Mapping[str, str]) -> bool:
    return environ.get("RAYCREW_FORCE_REBUILD_VENVS", "").lower() in ("1", "true", "yes")


def create_local_venv(
    py_executable: str | EnvironmentSpec,
    venv_name: str,
    force_rebuild: bool = False,
    *,
    store: Store | None = None,
) -> str:
    """Path of the Python of an environment on this machine.

    Args:
        py_executable: `"uv run --locked --extra vllm --directory D"` or any other `uv run` form, the folder
            of a project, a requirements file, or the path of an interpreter, returned once it was probed.
        venv_name: A readable name for it; environments of equal content are shared whatever their names.
        force_rebuild: Choose versions and build anew even if it is there.
        store: Where environments lie; the default store if left out.

    Raises:
        SpecError: `py_executable` is none of these, or the name is not a plain file name.
        VenvError: It could not be built; nothing was published.
    """
    check_name(venv_name)
    spec = parse(py_executable)
    if spec.kind == "interpreter":
        return checked_interpreter(spec.path)
    store = store or Store()
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
