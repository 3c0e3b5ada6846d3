"""A virtual environment per kind of worker: a spec in, an interpreter path out, the same on every node."""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from raycrew.venv_manager._spec import EnvironmentSpec, explain
from raycrew.venv_manager._store import Drift, Environment, Removal, Store, collect, verify
from raycrew.venv_manager._uv import parse
from raycrew.venv_manager.errors import (
    BuildFailedError,
    BuildTimeoutError,
    ConflictingExtrasError,
    CredentialsError,
    DiskFullError,
    EnvironmentInUseError,
    IncompatibleEnvironmentError,
    InputsChangedError,
    LockOutdatedError,
    NetworkError,
    ProbeError,
    ProvisionError,
    ReadOnlyStoreError,
    ResolutionError,
    SpecError,
    StoreError,
    StoreTimeoutError,
    UntrustedStoreError,
    UvError,
    UvNotFoundError,
    UvVersionError,
    VenvError,
)
from raycrew.venv_manager.protocols import NodeRunner
from raycrew.venv_manager.provision import (
    RegistryEnvironmentProvider,
    create_local_venv,
    create_local_venv_on_each_node,
    ensure,
    identify,
    prefetch,
)
from raycrew.venv_manager.registry import (
    ACTOR_ENVIRONMENT_REGISTRY,
    PY_EXECUTABLES,
    ActorEnvironmentRegistry,
    get_actor_python_env,
    register_actor_environment,
)

__all__ = [
    "ACTOR_ENVIRONMENT_REGISTRY",
    "PY_EXECUTABLES",
    "ActorEnvironmentRegistry",
    "BuildFailedError",
    "BuildTimeoutError",
    "ConflictingExtrasError",
    "CredentialsError",
    "DiskFullError",
    "Drift",
    "Environment",
    "EnvironmentInUseError",
    "EnvironmentSpec",
    "IncompatibleEnvironmentError",
    "InputsChangedError",
    "LockOutdatedError",
    "NetworkError",
    "NodeRunner",
    "ProbeError",
    "ProvisionError",
    "ReadOnlyStoreError",
    "RegistryEnvironmentProvider",
    "Removal",
    "ResolutionError",
    "SpecError",
    "Store",
    "StoreError",
    "StoreTimeoutError",
    "UntrustedStoreError",
    "UvError",
    "UvNotFoundError",
    "UvVersionError",
    "VenvError",
    "collect",
    "create_local_venv",
    "create_local_venv_on_each_node",
    "ensure",
    "explain",
    "get_actor_python_env",
    "identify",
    "parse",
    "prefetch",
    "register_actor_environment",
    "verify",
]

__version__: str

if not TYPE_CHECKING:  # Types are what is listed, whatever may be asked for here.

    def __getattr__(name: str) -> str:
        """The installed version, read when it is asked for."""
        if name == "__version__":
            return _version("raycrew-venv-manager")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
