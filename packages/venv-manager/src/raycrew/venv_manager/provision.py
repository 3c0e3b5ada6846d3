"""From a spec to an interpreter: here, and on each node."""

import inspect
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from raycrew.venv_manager import _digest
from raycrew.venv_manager._carry import Luggage, luggage
from raycrew.venv_manager._indexes import index_variables, without_password
from raycrew.venv_manager._interrupt import await_all, workers
from raycrew.venv_manager._probe import Expectation, check, probe
from raycrew.venv_manager._progress import Report, reporting
from raycrew.venv_manager._recipe import Recipe
from raycrew.venv_manager._resolve import expectation, resolve, sync_of
from raycrew.venv_manager._spec import EnvironmentSpec
from raycrew.venv_manager._store import Environment, Store, check_name
from raycrew.venv_manager._uv import uv_version
from raycrew.venv_manager._uv_run import parse
from raycrew.venv_manager.errors import ProvisionError, ReadOnlyStoreError, SpecError, UvNotFoundError
from raycrew.venv_manager.protocols import NodeRunner
from raycrew.venv_manager.registry import ACTOR_ENVIRONMENT_REGISTRY, ActorEnvironmentRegistry

logger = logging.getLogger(__name__)

T = TypeVar("T")
FOLLOW_S = 0.2  # between two looks at what a build says


def identify(spec: EnvironmentSpec, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Everything that decides what a spec's environment holds, on this machine and for this driver."""
    carried = _luggage(spec).identity() if spec.carry else {}
    indexes = {name: without_password(text) for name, text in index_variables(spec, environ).items()}
    return _digest.identity(spec, indexes, carried, partial(_uv_version, environ))


def ensure(
    spec: EnvironmentSpec | str | Path, *, store: Store | None = None, force_rebuild: bool = False
) -> Environment:
    """The environment of a spec on this machine, built if it is not there.

    Args:
        spec: A spec, or what `parse` understands.
        store: Where environments lie; the default store if left out.
        force_rebuild: Choose versions and build anew even if it is there.

    Raises:
        SpecError: The spec makes no sense; nothing was started.
        VenvError: It could not be built; nothing was published.
    """
    store = store or Store()
    spec = parse(spec)
    identity = identify(spec, store.environ)
    key = _digest.key_of(identity)
    force = force_rebuild or _forced(store.environ)
    if not force and (found := store.get(key)):
        return found
    with reporting(_title(spec, key)) as report:
        sync = sync_of(spec, _luggage(spec), store.environ)
        make = partial(_recipe, spec, key, identity, store, force, report, synced=sync is not None)
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
    key = _digest.key_of(identity)
    with reporting(_title(spec, key)) as report:
        return _recipe(spec, key, identity, store, force, report)


def _recipe(
    spec: EnvironmentSpec, key: str, identity: Mapping[str, Any], store: Store, force: bool, report: Report,
    *, synced: bool = False,
) -> Recipe:  # fmt: skip
    """The recipe that was kept, else a new one: an environment that is built again has the same versions.

    Beside a sync, the new one is not kept yet: that run of uv has still to find the lock to fit.
    """
    if not force and (kept := store.recipe(key)) is not None:
        return kept
    store.need_writable(key)
    made = resolve(
        spec, key, identity, _luggage(spec), environ=store.environ,
        variables=index_variables(spec, store.environ), on_line=report, timeout_s=store.build_timeout_s,
        checked=synced,
    )  # fmt: skip
    if not synced:
        store.keep_recipe(made)
    return made


def _luggage(spec: EnvironmentSpec) -> Luggage:
    return luggage() if spec.carry else Luggage()


def _title(spec: EnvironmentSpec, key: str) -> str:
    return f"environment {key[:8]} ({Path(spec.path).name or spec.kind})"


def _forced(environ: Mapping[str, str]) -> bool:
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


def install_recipe(content: bytes, root: str, force: bool = False) -> dict[str, Any]:
    """What each node does: build a recipe at its path, if it is not there.

    Returns:
        The interpreter's path, the node's host name and the seconds of each step (none if it was there).
    """
    recipe = Recipe.from_bytes(content)
    store = Store(root)
    there = not force and store.python(recipe.key) is not None
    with reporting(f"environment {recipe.key[:8]}") as report:
        environment = store.install(
            recipe.key, lambda: recipe, python=recipe.python, force=force, report=report
        )
    return {
        "python": str(environment.python),
        "host": platform.node(),
        "seconds": {} if there else dict(environment.stamp["seconds"]),
    }


def use_published(key: str, root: str) -> dict[str, Any]:
    """What each node does where the driver may only read the store: find the environment in its own.

    Raises:
        ReadOnlyStoreError: It is not there.
    """
    environment = Store(root).get(key)
    if environment is None:
        raise ReadOnlyStoreError(
            f"environment {key} is not in {root}, and cannot be built: the driver may only read its store, "
            "which holds the recipe; `python -m raycrew.venv_manager prefetch` builds it on this node"
        )
    return {"python": str(environment.python), "host": platform.node(), "seconds": {}}


def create_local_venv_on_each_node(
    py_executable: str | EnvironmentSpec, venv_name: str, runner: NodeRunner, force_rebuild: bool = False
) -> str:
    """Path of the Python of an environment that is the same on each node.

    Versions are chosen once, here; each node then builds from the same lock, all at once.

    Args:
        py_executable: As for `create_local_venv`.
        venv_name: A readable name for it.
        runner: Runs a function once on each node: a `RayVirtualCluster`, a `RayConnection`.
        force_rebuild: Choose versions and build anew even where it is there.

    Raises:
        SpecError: `py_executable` or the name makes no sense.
        ProvisionError: It could not be brought to every node.
    """
    check_name(venv_name)
    spec = parse(py_executable)
    if spec.kind == "interpreter":
        return _checked_everywhere(spec.path, runner)
    store = Store()
    force = force_rebuild or _forced(store.environ)
    key = _digest.key_of(identify(spec, store.environ))
    root = str(store.root)
    if not force and store.sealed(key):
        work = partial(use_published, key, root)
    else:
        work = partial(install_recipe, prepare(spec, store, force=force).to_bytes(), root, force)
    path = str(store.path(key))
    _on_each_node(work, runner, venv_name, path, store.locks(key).progress)
    store.locks(key).use()  # nodes that share the store keep it while this driver lives
    store.name(venv_name, key)
    return path


def _checked_everywhere(path: str, runner: NodeRunner) -> str:
    expected = expectation(EnvironmentSpec.interpreter(path), luggage())
    _on_each_node(partial(_check_here, path, expected), runner, path, path)
    return path


def _check_here(path: str, expected: Expectation) -> dict[str, Any]:
    if Path(path) != Path(sys.executable):
        check(probe(path, expected.imports), expected)
    return {"python": path, "host": platform.node(), "seconds": {}}


def _caught(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A node's answer; an error as text, so that one node's failure does not hide how the others did."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - carried to the driver, which raises it
        return {"host": platform.node(), "error": f"{type(error).__name__}: {error}"}


def _answers(work: Callable[[], T], runner: NodeRunner) -> Iterator[tuple[str, T]]:
    """Run on each node; a runner with a deadline of its own is given one that is long enough for a build."""
    if "timeout_s" in inspect.signature(runner.run_on_each_node).parameters:
        return partial(runner.run_on_each_node, timeout_s=Store().build_timeout_s)(work)  # type: ignore[call-arg]
    return runner.run_on_each_node(work)


def _on_each_node(
    work: Callable[[], dict[str, Any]],
    runner: NodeRunner,
    label: str,
    path: str,
    said: Callable[[], str] = str,
) -> None:
    """Run on each node and see that all came to the same path; `said` tells what a build here does."""
    failures = {}
    with reporting(f"environment {label} on each node") as report, _told(said, report) as told:
        for done, (node, answer) in enumerate(_answers(partial(_caught, work), runner), 1):
            seconds = sum(answer.get("seconds", {}).values())
            told(f"{done} done, the last one {answer['host']} ({seconds:.1f} s)")
            if "error" in answer:
                failures[node] = f"{answer['host']}: {answer['error']}"
            elif answer["python"] != path:
                failures[node] = f"{answer['host']} has it at {answer['python']} instead of {path}"
    if failures:
        text = "\n".join(f"node {node} ({what})" for node, what in failures.items())
        raise ProvisionError(f"{label} is not on every node:\n{text}", failures=failures)


@contextmanager
def _told(said: Callable[[], str], report: Report) -> Iterator[Report]:
    """Report what is told, with what a build in this machine's store says meanwhile."""
    told, ended = ["none done"], threading.Event()

    def follow() -> None:
        while True:
            text = said()
            report(f"{told[-1]}; here: {text}" if text else told[-1])
            if ended.wait(FOLLOW_S):
                return

    def tell(text: str) -> None:
        told.append(text)
        report(text)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        ended.set()
        thread.join()


class RegistryEnvironmentProvider:
    """Gives worker groups the interpreter of a worker's class, built on every node before it is used.

    Args:
        registry: Where environments are looked up; `ACTOR_ENVIRONMENT_REGISTRY` if left out.
    """

    def __init__(self, registry: ActorEnvironmentRegistry | None = None) -> None:
        self._registry = ACTOR_ENVIRONMENT_REGISTRY if registry is None else registry
        self._locks: dict[EnvironmentSpec | str, threading.Lock] = {}
        self._guard = threading.Lock()

    def python_for(self, actor_class_fqn: str, runner: NodeRunner | None) -> str | None:
        """Path of the interpreter for a class's actors, the same on each node; None for the driver's own.

        Args:
            actor_class_fqn: Full name of the class, which is not imported.
            runner: Runs a function once on each node of the cluster; None for this machine only.

        Raises:
            VenvError: The environment could not be built, or does not fit the driver.
        """
        given = self._registry.find(actor_class_fqn)
        if given is None:
            return None
        spec = parse(given)
        if spec.kind == "interpreter" and Path(spec.path) == Path(sys.executable):
            return None
        with self._guard:
            lock = self._locks.setdefault(spec, threading.Lock())
        with lock:
            if runner is None:
                return create_local_venv(spec, actor_class_fqn)
            return create_local_venv_on_each_node(spec, actor_class_fqn, runner)


def prefetch(
    registry: ActorEnvironmentRegistry | None = None,
    *,
    store: Store | None = None,
    runner: NodeRunner | None = None,
    names: Collection[str] = (),
    max_builds: int = 2,
) -> dict[str, str]:
    """Build all registered environments ahead, for an image or before a run; equal ones once.

    Args:
        registry: Where they are registered; `ACTOR_ENVIRONMENT_REGISTRY` if left out.
        store: Where they go, without a `runner`; the default store if left out.
        runner: Builds them on each node of a cluster.
        names: Only these classes; all if empty.
        max_builds: How many are built at the same time.

    Returns:
        Class name to interpreter.

    Raises:
        ProvisionError: Some could not be built; the others were.
    """
    chosen = ACTOR_ENVIRONMENT_REGISTRY if registry is None else registry
    wanted = {fqn: parse(spec) for fqn, spec in chosen.items() if not names or fqn in names}
    if unknown := set(names) - set(wanted):
        raise SpecError(f"nothing is registered for {', '.join(sorted(unknown))}")

    def build(spec: EnvironmentSpec) -> str:
        if runner is not None:
            return create_local_venv_on_each_node(spec, "prefetched", runner)
        return (
            checked_interpreter(spec.path)
            if spec.kind == "interpreter"
            else str(ensure(spec, store=store).python)
        )

    with workers(max_builds) as pool:
        running = {spec: pool.submit(build, spec) for spec in dict.fromkeys(wanted.values())}
        await_all(running.values())
    failures = {
        fqn: f"{type(error).__name__}: {error}"
        for fqn, spec in wanted.items()
        if (error := running[spec].exception()) is not None
    }
    if failures:
        text = "\n".join(f"{fqn}: {what}" for fqn, what in failures.items())
        raise ProvisionError(
            f"{len(failures)} of {len(wanted)} environments failed:\n{text}", failures=failures
        )
    return {fqn: running[spec].result() for fqn, spec in wanted.items()}
