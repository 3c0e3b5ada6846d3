"""HTTP services beside workers: servers as replicas on a cluster, kept up, and reached by endpoints."""

from typing import TYPE_CHECKING

from raycrew.worker_groups.services._endpoint import Endpoint, ReplicaState
from raycrew.worker_groups.services._service import Service
from raycrew.worker_groups.services.errors import (
    ServiceClosedError,
    ServiceError,
    ServiceStartError,
    ServiceStartTimeoutError,
    ServiceTimeoutError,
)

if TYPE_CHECKING:
    from raycrew.worker_groups.services._proxy import Proxy

__all__ = [
    "Endpoint",
    "Proxy",
    "ReplicaState",
    "Service",
    "ServiceClosedError",
    "ServiceError",
    "ServiceStartError",
    "ServiceStartTimeoutError",
    "ServiceTimeoutError",
]


def __getattr__(name: str) -> object:
    """The proxy, imported when it is first used: commands can be served without the extra."""
    if name == "Proxy":
        from raycrew.worker_groups.services._proxy import Proxy

        return Proxy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
