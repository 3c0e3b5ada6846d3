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
    from raycrew.worker_groups.services._gateway import Gateway
    from raycrew.worker_groups.services._in_thread import AppServer
    from raycrew.worker_groups.services._proxy import Proxy

__all__ = [
    "AppServer",
    "Endpoint",
    "Gateway",
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
    """What needs the extra, imported when it is first used: commands can be served without it."""
    if name == "AppServer":
        from raycrew.worker_groups.services._in_thread import AppServer

        return AppServer
    if name == "Gateway":
        from raycrew.worker_groups.services._gateway import Gateway

        return Gateway
    if name == "Proxy":
        from raycrew.worker_groups.services._proxy import Proxy

        return Proxy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
