"""Virtual clusters on Ray."""

from raycrew.cluster_core._devices import DeviceBinding, bind_device
from raycrew.cluster_core._environment import DEFAULT_POLICY, EnvironmentPolicy, Secrets
from raycrew.cluster_core._ports import PortLease, lease_ports
from raycrew.cluster_core._topology import Bundle, Placement, Rendezvous
from raycrew.cluster_core.errors import (
    AllocationTimeoutError,
    BundlesOccupiedError,
    ClusterClosedError,
    ClusterError,
    InfeasibleRequestError,
    NodeCallError,
    NodeCallTimeoutError,
    NodeLostError,
    PortsExhaustedError,
    ResourceInsufficientError,
)
from raycrew.cluster_core.protocols import Claim, Cluster, Occupant

__all__ = [
    "DEFAULT_POLICY",
    "AllocationTimeoutError",
    "Bundle",
    "BundlesOccupiedError",
    "Claim",
    "Cluster",
    "ClusterClosedError",
    "ClusterError",
    "DeviceBinding",
    "EnvironmentPolicy",
    "InfeasibleRequestError",
    "NodeCallError",
    "NodeCallTimeoutError",
    "NodeLostError",
    "Occupant",
    "Placement",
    "PortLease",
    "PortsExhaustedError",
    "Rendezvous",
    "ResourceInsufficientError",
    "Secrets",
    "bind_device",
    "lease_ports",
]
