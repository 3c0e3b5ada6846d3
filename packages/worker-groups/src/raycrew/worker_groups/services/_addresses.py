"""Which addresses servers listen on, and which ones others know them by."""

import socket

from raycrew.cluster_core import Session, node_states
from raycrew.worker_groups._ray import own_node

LOOPBACK = "127.0.0.1"
_EVERYWHERE = {"0.0.0.0": LOOPBACK, "::": "::1"}  # compared, not bound # nosec B104


def loopback_if_alone() -> str | None:
    """Loopback while the Ray cluster is one node; None, for the address of each node, where it has more."""
    return LOOPBACK if Session.current() is None or len(node_states()) == 1 else None


def node_address() -> str:
    """The address of this node for others: Ray's, or without Ray that of the machine's name."""
    return socket.gethostname() if Session.current() is None else own_node()[1]


def as_known(host: str, address: str) -> str:
    """Where others reach a server that listens on an address; all addresses are known by the node's."""
    return address if host in _EVERYWHERE else host


def as_asked_here(host: str) -> str:
    """Where the node itself reaches a server that listens on an address."""
    return _EVERYWHERE.get(host, host)
