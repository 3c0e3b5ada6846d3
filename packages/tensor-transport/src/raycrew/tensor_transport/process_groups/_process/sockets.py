"""Sockets of this process: the address to be reached at, listening, and cutting what a library opened."""

import contextlib
import os
import socket
import stat
import time
from collections.abc import Collection, Iterator
from pathlib import Path

Endpoint = tuple[str, int]
"""Address and port."""

_DESCRIPTORS = Path("/proc/self/fd")
_CLOSED_S, _PAUSE_S = 5.0, 0.001
_INTERNET = (socket.AF_INET, socket.AF_INET6)


def listen_on(address: str) -> socket.socket:
    """A socket that listens on a free port of an address, and no other."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, 0), family=family, backlog=128)


def endpoint_of(sock: socket.socket) -> Endpoint:
    """A socket's own address and port."""
    address, port = sock.getsockname()[:2]
    return str(address), int(port)


def address_towards(endpoint: Endpoint) -> str:
    """The address of this machine on the way to another: the one at which it is reached from there."""
    family, kind, *_, target = socket.getaddrinfo(*endpoint, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # Nothing is sent.
        return endpoint_of(probe)[0]


def cut(own: Endpoint, others: Collection[Endpoint]) -> None:
    """End the connections between a listening socket of this process and others, whoever opened them.

    Returns when their owner has seen it and closed them: what was on its way then comes no more.
    """
    end = time.monotonic() + _CLOSED_S
    while _shut_down(own, others) and time.monotonic() < end:
        time.sleep(_PAUSE_S)


def _shut_down(own: Endpoint, others: Collection[Endpoint]) -> int:
    found = 0
    for connection in _connections():
        with connection, contextlib.suppress(OSError):
            here, there = endpoint_of(connection), connection.getpeername()[:2]
            if here == own or there in others:
                found += 1
                connection.shutdown(socket.SHUT_RDWR)
    return found


def _connections() -> Iterator[socket.socket]:
    """The internet sockets of this process, as duplicates: what is looked at stays what it is meanwhile."""
    for entry in list(_DESCRIPTORS.iterdir()):
        try:
            duplicate = os.dup(int(entry.name))
        except OSError:  # Closed meanwhile.
            continue
        if not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
            os.close(duplicate)
            continue
        connection = socket.socket(fileno=duplicate)
        if connection.family in _INTERNET and connection.type == socket.SOCK_STREAM:
            yield connection
        else:
            connection.close()
