"""A member's end of a generation: the same bytes from one member to all others."""

from raycrew.tensor_transport.process_groups._broadcasting.fabric import Fabric, device_for, fabric_for
from raycrew.tensor_transport.process_groups._broadcasting.group import CollectiveGroup
from raycrew.tensor_transport.process_groups._broadcasting.session import Party

__all__ = [
    "CollectiveGroup",
    "Fabric",
    "Party",
    "device_for",
    "fabric_for",
]
