"""Whether a member's process is still there, asked without its help.

A member listens on a socket that it never has to serve: the kernel takes connections for it as long as its
process lives, and refuses them as soon as it is gone, also while forked children keep its other connections.
"""

import contextlib
import socket

from raycrew.tensor_transport.process_groups._process import endpoint_of, listen_on

_PROBE_S = 1.0


class Lifeline:
    """A listening socket that says that this process is there.

    Args:
        address: The address at which the other members reach this process.
    """

    def __init__(self, address: str) -> None:
        self._socket = listen_on(address)
        self._socket.setblocking(False)
        self.endpoint = endpoint_of(self._socket)

    def drain(self) -> None:
        """Let go of the connections of those who asked, so that there is room for the next."""
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._socket.close()


def is_gone(endpoint: tuple[str, int]) -> bool:
    """Whether the process behind a lifeline is known to be gone; silence is not knowledge."""
    try:
        socket.create_connection(endpoint, timeout=_PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
