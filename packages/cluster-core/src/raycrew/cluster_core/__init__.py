"""Virtual clusters on Ray."""

from raycrew.cluster_core._devices import DeviceBinding, bind_device
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
    "AllocationTimeoutError",
    "Bundle",
    "BundlesOccupiedError",
    "Claim",
    "Cluster",
    "ClusterClosedError",
    "ClusterError",
    "DeviceBinding",
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
    "bind_device",
    "lease_ports",
]
