"""What a member's process has: sockets, forked children, and calls that end at a deadline."""

from raycrew.tensor_transport.process_groups._process.deadline import Deadline
from raycrew.tensor_transport.process_groups._process.forks import keep_for_ever
from raycrew.tensor_transport.process_groups._process.gate import Gate
from raycrew.tensor_transport.process_groups._process.sockets import (
    Endpoint,
    address_towards,
    cut,
    endpoint_of,
    listen_on,
)

__all__ = [
    "Deadline",
    "Endpoint",
    "Gate",
    "address_towards",
    "cut",
    "endpoint_of",
    "keep_for_ever",
    "listen_on",
]
