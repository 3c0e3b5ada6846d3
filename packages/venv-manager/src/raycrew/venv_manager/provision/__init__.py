"""From a spec to an interpreter, on this machine and on every node of a cluster."""

from raycrew.venv_manager.provision._here import (
    checked_interpreter,
    create_local_venv,
    ensure,
    identify,
    identity_of,
    prepare,
    published_key,
)
from raycrew.venv_manager.provision._nodes import (
    RegistryEnvironmentProvider,
    create_local_venv_on_each_node,
    prefetch,
)

__all__ = [
    "RegistryEnvironmentProvider",
    "checked_interpreter",
    "create_local_venv",
    "create_local_venv_on_each_node",
    "ensure",
    "identify",
    "identity_of",
    "prefetch",
    "prepare",
    "published_key",
]
