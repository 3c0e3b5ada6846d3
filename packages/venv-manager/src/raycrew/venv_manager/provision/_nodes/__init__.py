"""The same environments on every node of a cluster."""

from raycrew.venv_manager.provision._nodes.on_nodes import create_local_venv_on_each_node
from raycrew.venv_manager.provision._nodes.prefetching import prefetch
from raycrew.venv_manager.provision._nodes.provider import RegistryEnvironmentProvider

__all__ = ["RegistryEnvironmentProvider", "create_local_venv_on_each_node", "prefetch"]
