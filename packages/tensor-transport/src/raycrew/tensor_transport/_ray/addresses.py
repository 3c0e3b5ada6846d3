"""Where a listening socket is, for this machine and for others."""

import socket

from raycrew.tensor_transport._ray.nodes import node_address

_ELSEWHERE = ("192.0.2.1", 9)  # An address for documentation: nothing is sent there.


def address_for_others(host: str) -> str:
    """Where others reach this machine, if a server listens on all addresses; else where it listens."""
    if host not in ("0.0.0.0", "::", ""):  # compared, not bound # nosec B104
        return host
    if known := node_address():
        return known
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
