"""Virtual clusters on Ray."""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from raycrew.cluster_core._connection import DEFAULT_POLICY, ClusterConfig, EnvironmentPolicy, Secrets
from raycrew.cluster_core._devices import DeviceBinding, accelerators_of, bind_device, visible_devices
from raycrew.cluster_core._planning import (
    Bundle,
    BundleSpec,
    NodeState,
    Placement,
    PlacementPlan,
    PlacementRequest,
    Rendezvous,
    plan_cluster,
)
from raycrew.cluster_core._ports import PortLease, lease_ports
from raycrew.cluster_core._ray import lazy
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
    from raycrew.cluster_core._placement import RayVirtualCluster
    from raycrew.cluster_core._ray import Session, node_states

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
    "accelerators_of",
    "bind_device",
    "init_ray",
    "lease_ports",
    "node_states",
    "plan_cluster",
    "visible_devices",
]

__version__: str

# What needs Ray is imported when it is first used: planning does without.
_later = lazy(
    __name__,
    {
        "_connection": ["RayConnection", "init_ray"],
        "_placement": ["RayVirtualCluster"],
        "_ray": ["Session", "node_states"],
    },
)

if not TYPE_CHECKING:  # Types are what is listed, whatever may be asked for here.

    def __getattr__(name: str) -> object:
        """What is imported late, and the installed version, read when it is asked for."""
        return _version("raycrew-cluster-core") if name == "__version__" else _later(name)
