"""What the TCP transport listens with, and the bytes that it speaks."""

from raycrew.tensor_transport.transports._sockets.addresses import address_for_others
from raycrew.tensor_transport.transports._sockets.serving import Listener
from raycrew.tensor_transport.transports._sockets.wire import (
    GONE,
    HERE,
    MAX_REQUESTS,
    HangupError,
    Request,
    fill,
    greet,
    packed,
    take,
)

__all__ = [
    "GONE",
    "HERE",
    "MAX_REQUESTS",
    "HangupError",
    "Listener",
    "Request",
    "address_for_others",
    "fill",
    "greet",
    "packed",
    "take",
]
