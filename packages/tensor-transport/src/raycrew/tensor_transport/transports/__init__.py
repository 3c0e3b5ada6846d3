"""How bytes move between processes: pulled by their readers, or broadcast to a group."""

from raycrew.tensor_transport._ray import address_for_others
from raycrew.tensor_transport.transports._choosing import (
    Candidate,
    Choice,
    MemberFacts,
    boot_id,
    choose_transport,
    member_facts,
    start_of,
    this_process,
)
from raycrew.tensor_transport.transports._interface import (
    BroadcastTransport,
    Buffer,
    Capabilities,
    Guard,
    Offer,
    Owner,
    PullTransport,
    Region,
    ReservingTransport,
    Transfer,
    Transport,
    bytes_of,
    memory_of,
)
from raycrew.tensor_transport.transports.cuda_ipc import CudaIpcTransport
from raycrew.tensor_transport.transports.nixl import NixlTransport
from raycrew.tensor_transport.transports.object_store import ObjectStoreTransport
from raycrew.tensor_transport.transports.process_vm import ProcessVmTransport
from raycrew.tensor_transport.transports.shared_memory import SharedMemoryTransport
from raycrew.tensor_transport.transports.tcp import TcpTransport

__all__ = [
    "BroadcastTransport",
    "Buffer",
    "Candidate",
    "Capabilities",
    "Choice",
    "CudaIpcTransport",
    "Guard",
    "MemberFacts",
    "NixlTransport",
    "ObjectStoreTransport",
    "Offer",
    "Owner",
    "ProcessVmTransport",
    "PullTransport",
    "Region",
    "ReservingTransport",
    "SharedMemoryTransport",
    "TcpTransport",
    "Transfer",
    "Transport",
    "address_for_others",
    "boot_id",
    "bytes_of",
    "choose_transport",
    "member_facts",
    "memory_of",
    "start_of",
    "this_process",
]
