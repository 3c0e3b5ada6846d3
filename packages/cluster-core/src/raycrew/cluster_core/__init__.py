"""Virtual clusters on Ray."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raycrew.cluster_core._connection.config import ClusterConfig
from raycrew.cluster_core._connection.environment import DEFAULT_POLICY, EnvironmentPolicy, Secrets
from raycrew.cluster_core._devices.binding import DeviceBinding, bind_device
from raycrew.cluster_core._placement.plan import PlacementPlan, PlacementRequest, plan_cluster
from raycrew.cluster_core._ports.leases import PortLease, lease_ports
from raycrew.cluster_core._topology import Bundle, NodeState, Placement, Rendezvous
from raycrew.cluster_core.errors import (
    AllocationTimeoutError,
    BundlesOccupiedError,
    ClusterAuthenticationError,
    ClusterClosedError,
    ClusterConnectionError,
    ClusterError,
    ClusterUnreachableError,
    InfeasibleRequestError,
    NoClusterError,
    NodeCallError,
    NodeCallTimeoutError,
    NodeLostError,
    PortsExhaustedError,
    ResourceInsufficientError,
)
from raycrew.cluster_core.protocols import Claim, Cluster, Occupant

if TYPE_CHECKING:
    from raycrew.cluster_core._connection.connection import RayConnection
    from raycrew.cluster_core._connection.init import init_ray
    from raycrew.cluster_core._virtual_cluster import RayVirtualCluster

__all__ = [
    "DEFAULT_POLICY",
    "AllocationTimeoutError",
    "Bundle",
    "BundlesOccupiedError",
    "Claim",
    "Cluster",
    "ClusterAuthenticationError",
    "ClusterClosedError",
    "ClusterConfig",
    "ClusterConnectionError",
    "ClusterError",
    "ClusterUnreachableError",
    "DeviceBinding",
    "EnvironmentPolicy",
    "InfeasibleRequestError",
    "NoClusterError",
    "NodeCallError",
    "NodeCallTimeoutError",
    "NodeLostError",
    "NodeState",
    "Occupant",
    "Placement",
    "PlacementPlan",
    "PlacementRequest",
    "PortLease",
    "PortsExhaustedError",
    "RayConnection",
    "RayVirtualCluster",
    "Rendezvous",
    "ResourceInsufficientError",
    "Secrets",
    "bind_device",
    "init_ray",
    "lease_ports",
    "plan_cluster",
]

# What needs Ray is imported when it is first used: planning does without.
_LAZY = {
    "RayConnection": "_connection.connection",
    "init_ray": "_connection.init",
    "RayVirtualCluster": "_virtual_cluster",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
