"""The registry as a provider of environments: what worker groups ask for a class's interpreter."""

import os
import sys
import threading
from pathlib import Path

from raycrew.venv_manager._spec import EnvironmentSpec
from raycrew.venv_manager._store import Store
from raycrew.venv_manager._uv import parse
from raycrew.venv_manager.protocols import NodeRunner
from raycrew.venv_manager.provision._here import create_local_venv
from raycrew.venv_manager.provision._nodes.on_nodes import create_local_venv_on_each_node
from raycrew.venv_manager.registry import ACTOR_ENVIRONMENT_REGISTRY, ActorEnvironmentRegistry


class RegistryEnvironmentProvider:
    """Gives worker groups the interpreter of a worker's class, built on every node before it is used.

    Args:
        registry: Where environments are looked up; `ACTOR_ENVIRONMENT_REGISTRY` if left out.
        store: Where environments lie; the default store if left out.
    """

    def __init__(
        self, registry: ActorEnvironmentRegistry | None = None, *, store: Store | None = None
    ) -> None:
        self._store = store
        self._registry = ACTOR_ENVIRONMENT_REGISTRY if registry is None else registry
        self._locks: dict[tuple[int, EnvironmentSpec], threading.Lock] = {}

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
        # A process that is forked meanwhile has locks of its own: nobody there is done with these.
        with self._locks.setdefault((os.getpid(), spec), threading.Lock()):
            if runner is None:
                return create_local_venv(spec, actor_class_fqn, store=self._store)
            return create_local_venv_on_each_node(spec, actor_class_fqn, runner, store=self._store)
