"""All registered environments, built ahead of their use."""

from collections.abc import Collection

from raycrew.venv_manager._spec import EnvironmentSpec, need_several
from raycrew.venv_manager._store import Store
from raycrew.venv_manager._uv import parse
from raycrew.venv_manager._waiting import await_all, workers
from raycrew.venv_manager.errors import ProvisionError, SpecError
from raycrew.venv_manager.protocols import NodeRunner
from raycrew.venv_manager.provision._here import checked_interpreter, ensure
from raycrew.venv_manager.provision._nodes.on_nodes import create_local_venv_on_each_node
from raycrew.venv_manager.registry import ACTOR_ENVIRONMENT_REGISTRY, ActorEnvironmentRegistry


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
        store: Where they go; the default store if left out.
        runner: Builds them on each node of a cluster.
        names: Only these classes; all if empty.
        max_builds: How many are built at the same time.

    Returns:
        Class name to interpreter.

    Raises:
        ProvisionError: Some could not be built; the others were.
        SpecError: Nothing is registered for one of the names.
        TypeError: One name is given where several are meant.
    """
    need_several("names", names)
    chosen = ACTOR_ENVIRONMENT_REGISTRY if registry is None else registry
    wanted = {fqn: parse(spec) for fqn, spec in chosen.items() if not names or fqn in names}
    if unknown := set(names) - set(wanted):
        raise SpecError(f"nothing is registered for {', '.join(sorted(unknown))}")

    def build(spec: EnvironmentSpec) -> str:
        if runner is not None:
            return create_local_venv_on_each_node(spec, "prefetched", runner, store=store)
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
