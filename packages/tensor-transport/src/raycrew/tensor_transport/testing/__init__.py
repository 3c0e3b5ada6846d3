"""Fakes for tests without Ray, and the conformance functions that every implementation passes."""

from raycrew.tensor_transport.testing._broadcasting import BroadcastCase, BroadcastPeer
from raycrew.tensor_transport.testing._conformance import (
    BackendCase,
    Peer,
    check_shard_backend,
    hold,
    put_rows,
    read_sum,
    sum_of_held,
)
from raycrew.tensor_transport.testing._devices import take_device
from raycrew.tensor_transport.testing._fakes import (
    InProcessBackend,
    InProcessByteStore,
    LocalPeers,
    LocalRank,
    LocalResults,
)
from raycrew.tensor_transport.testing._pulling import PullCase
from raycrew.tensor_transport.testing._transports import (
    TransportCase,
    bits_of,
    bounded_memory,
    check_transport,
    large_tensor,
    nothing_left,
    samples,
    tiny_tensors,
)

__all__ = [
    "BackendCase",
    "BroadcastCase",
    "BroadcastPeer",
    "InProcessBackend",
    "InProcessByteStore",
    "LocalPeers",
    "LocalRank",
    "LocalResults",
    "Peer",
    "PullCase",
    "TransportCase",
    "bits_of",
    "bounded_memory",
    "check_shard_backend",
    "check_transport",
    "hold",
    "large_tensor",
    "nothing_left",
    "put_rows",
    "read_sum",
    "samples",
    "sum_of_held",
    "take_device",
    "tiny_tensors",
]
