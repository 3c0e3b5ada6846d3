"""Virtual clusters on Ray."""

from typing import TYPE_CHECKING

from raycrew.cluster_core._connection import DEFAULT_POLICY, ClusterConfig, EnvironmentPolicy, Secrets
from raycrew.cluster_core._devices import DeviceBinding, bind_device
from raycrew.cluster_core._planning import BundleSpec, PlacementPlan, PlacementRequest, plan_cluster
from raycrew.cluster_core._ports import PortLease, lease_ports
from raycrew.cluster_core._ray import lazy
from raycrew.cluster_core._topology import Bundle, NodeState, Placement, Rendezvous
from raycrew.cluster_core.errors import (
    AllocationTimeoutError,
    BundlesLostError,
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
    from raycrew.cluster_core._connection import RayConnection, init_ray
    from raycrew.cluster_core._ray import Session, node_states
    from raycrew.cluster_core._version import __version__ as __version__
    from raycrew.cluster_core._virtual_cluster import RayVirtualCluster

__all__ = [
    "DEFAULT_POLICY",
    "AllocationTimeoutError",
    "Bundle",
    "BundleSpec",
    "BundlesLostError",
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
    "Session",
    "bind_device",
    "init_ray",
    "lease_ports",
    "node_states",
    "plan_cluster",
]

# What needs Ray is imported when it is first used: planning does without.
__getattr__ = lazy(
    __name__,
    {
        "_connection": ["RayConnection", "init_ray"],
        "_ray": ["Session", "node_states"],
        "_version": ["__version__"],
        "_virtual_cluster": ["RayVirtualCluster"],
    },
)
