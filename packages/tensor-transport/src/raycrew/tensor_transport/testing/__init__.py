"""Fakes for tests without Ray, and the conformance functions that every implementation passes."""

from raycrew.tensor_transport.testing._conformance import (
    BackendCase,
    Peer,
    check_shard_backend,
    hold,
    put_rows,
    read_sum,
    sum_of_held,
)
from raycrew.tensor_transport.testing._fakes import (
    InProcessBackend,
    InProcessByteStore,
    LocalPeers,
    LocalRank,
    LocalResults,
)

__all__ = [
    "BackendCase",
    "InProcessBackend",
    "InProcessByteStore",
    "LocalPeers",
    "LocalRank",
    "LocalResults",
    "Peer",
    "check_shard_backend",
    "hold",
    "put_rows",
    "read_sum",
    "sum_of_held",
]
