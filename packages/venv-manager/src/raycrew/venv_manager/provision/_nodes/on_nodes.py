"""The same environment at the same path on each node of a cluster."""

import inspect
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from raycrew.venv_manager._spec import EnvironmentSpec
from raycrew.venv_manager._store import Expectation, Recipe, Store, check, check_name, luggage, probe
from raycrew.venv_manager._uv import parse
from raycrew.venv_manager._waiting import Report, reporting
from raycrew.venv_manager.errors import ProvisionError, ReadOnlyStoreError
from raycrew.venv_manager.protocols import NodeRunner
from raycrew.venv_manager.provision._here import prepare, published_key, rebuilding
from raycrew.venv_manager.provision._resolving import expectation

T = TypeVar("T")
FOLLOW_S = 0.2  # between two looks at what a build says
_STEPS = 4  # each of which may take a store's deadline: two waits for others, two runs of uv
_PROBE_S = 600.0  # for the probe, and for a node to begin


def install_recipe(content: bytes, opened: Callable[[], Store], token: str = "") -> dict[str, Any]:
    """What each node does: build a recipe at its path, if it is not there.

    Args:
        content: The recipe.
        opened: Gives the node's store.
        token: Of a rebuild that is asked for, the same for all nodes: those that share files build once.

    Returns:
        The interpreter's path, the node's host name and the seconds of each step (none if it was there).
    """
    recipe, store = Recipe.from_bytes(content), opened()
    there = not token and store.python(recipe.key) is not None
    with reporting(f"environment {recipe.key[:8]}") as report:
        environment = store.install(
            recipe.key, lambda: recipe, python=recipe.python, force=bool(token), token=token, report=report
        )
    return {
        "python": str(environment.python),
        "host": platform.node(),
        "seconds": {} if there else dict(environment.stamp["seconds"]),
    }


def use_published(key: str, opened: Callable[[], Store]) -> dict[str, Any]:
    """What each node does where the driver may only read the store: find the environment in its own.

    Raises:
        ReadOnlyStoreError: It is not there.
    """
    store = opened()
    environment = store.get(key)
    if environment is None:
        raise ReadOnlyStoreError(
            f"environment {key} is not in {store.root}, and cannot be built: the driver may only read its "
            "store, which holds the recipe; `raycrew-env prefetch` builds it on this node"
        )
    return {"python": str(store.on_this_machine(environment).python), "host": platform.node(), "seconds": {}}


def create_local_venv_on_each_node(
    py_executable: str | EnvironmentSpec,
    venv_name: str,
    runner: NodeRunner,
    force_rebuild: bool = False,
    *,
    store: Store | None = None,
) -> str:
    """Path of the Python of an environment that is the same on each node.

    Versions are chosen once, here; each node then builds from the same lock, all at once.

    Args:
        py_executable: As for `create_local_venv`.
        venv_name: A readable name for it.
        runner: Runs a function once on each node: a `RayVirtualCluster`, a `RayConnection`.
        force_rebuild: Choose versions and build anew even where it is there.
        store: Where environments lie, at the same path on each node, where the same owners, deadline and
            number of builds hold; the default store if left out.

    Raises:
        SpecError: `py_executable` or the name makes no sense.
        ProvisionError: It could not be brought to every node.
    """
    check_name(venv_name)
    spec = parse(py_executable)
    if spec.kind == "interpreter":
        return _checked_everywhere(spec.path, runner)
    store = store or Store()
    opened = partial(
        Store, str(store.root), build_timeout_s=store.build_timeout_s, max_builds=store.max_builds,
        trusted_owners=store.trusted_owners,
    )  # fmt: skip
    with rebuilding(spec, store, force_rebuild) as (force, token):
        key = published_key(spec, store)
        if not force and key is not None and store.sealed(key):
            work = partial(use_published, key, opened)
        else:
            recipe = prepare(spec, store, force=force)
            key = recipe.key
            work = partial(install_recipe, recipe.to_bytes(), opened, token)
        path = str(store.path(key))
        deadline_s = _STEPS * store.build_timeout_s + _PROBE_S
        _on_each_node(work, runner, venv_name, path, store.locks(key).progress, deadline_s)
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


def _answers(work: Callable[[], T], runner: NodeRunner, deadline_s: float) -> Iterator[tuple[str, T]]:
    """Run on each node; a runner with a deadline of its own is given one that is long enough for a build."""
    if "timeout_s" in inspect.signature(runner.run_on_each_node).parameters:
        return partial(runner.run_on_each_node, timeout_s=deadline_s)(work)  # type: ignore[call-arg]
    return runner.run_on_each_node(work)


def _on_each_node(
    work: Callable[[], dict[str, Any]],
    runner: NodeRunner,
    label: str,
    path: str,
    said: Callable[[], str] = str,
    deadline_s: float = _PROBE_S,
) -> None:
    """Run on each node and see that all came to the same path; `said` tells what a build here does."""
    failures = {}
    with reporting(f"environment {label} on each node") as report, _told(said, report) as told:
        for done, (node, answer) in enumerate(_answers(partial(_caught, work), runner, deadline_s), 1):
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
