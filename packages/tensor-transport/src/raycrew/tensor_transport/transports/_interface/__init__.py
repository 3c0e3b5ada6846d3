"""What ways to move bytes have in common: two interfaces, and transfers under way."""

from raycrew.tensor_transport.transports._interface.buffers import bytes_of, memory_of
from raycrew.tensor_transport.transports._interface.interface import (
    BroadcastTransport,
    Buffer,
    Capabilities,
    Offer,
    Owner,
    PullTransport,
    Region,
    ReservingTransport,
    Transport,
)
from raycrew.tensor_transport.transports._interface.transfer import Guard, Transfer

__all__ = [
    "BroadcastTransport",
    "Buffer",
    "Capabilities",
    "Guard",
    "Offer",
    "Owner",
    "PullTransport",
    "Region",
    "ReservingTransport",
    "Transfer",
    "Transport",
    "bytes_of",
    "memory_of",
]
