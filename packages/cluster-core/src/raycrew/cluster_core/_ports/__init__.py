"""Ports that stay taken between being chosen and being used, here and on the nodes of a cluster."""

from typing import TYPE_CHECKING

from raycrew.cluster_core._ports.leases import (
    PortLease,
    check_port_range,
    default_port_range,
    ephemeral_range,
    lease_ports,
)
from raycrew.cluster_core._ray import lazy

if TYPE_CHECKING:
    from raycrew.cluster_core._ports.rendezvous import PortKeepers

__all__ = [
    "PortKeepers",
    "PortLease",
    "check_port_range",
    "default_port_range",
    "ephemeral_range",
    "lease_ports",
]

__getattr__ = lazy(__name__, {"rendezvous": ["PortKeepers"]})
