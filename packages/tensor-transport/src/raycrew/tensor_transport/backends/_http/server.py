"""A server in a thread of this process, which whoever can reach its port can't exhaust."""

import asyncio
import contextlib
import functools
import os
import secrets
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, Self, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from raycrew.tensor_transport._bytes import Closing, memory_left, remake_in_child
from raycrew.tensor_transport._ray import address_for_others
from raycrew.tensor_transport.backends._http.app import LET_IN, ShardStore, shard_app
from raycrew.tensor_transport.errors import TransportError

_HEAD_BYTES = 64 << 10


class ShardServer(Closing):
    """Serves a store over HTTP from a thread of this process.

    Connections that send no request, or take no answer, in time are closed. Those over the limit are refused;
    clients of this package try again.

    Args:
        host: Address to bind to; loopback unless told otherwise. "0.0.0.0" and "::" mean all addresses; the
            URL then has that of this node.
        port: Port, 0 for any free one.
        token: What clients have to know; made up unless given.
        max_bytes: Refuse to hold more; half of the memory that is free at the start unless given.
        ssl_context: Speak https, with the certificate that was loaded into this context.
        advertise: Host name or address for the URL, where others know this one by another.
        max_connections: Connections at once of clients that have shown to know the token. As many others may
            be open: where there are more, the oldest of those makes room, so that strangers who connect and
            say nothing keep nobody out.
        header_timeout_s: A connection without a request under way has so long to send the head of one.
        idle_timeout_s: A request may pause for so long while it is sent, and an answer while it is taken.

    Raises:
        TransportError: The address can't be had.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        max_bytes: int | None = None,
        ssl_context: ssl.SSLContext | None = None,
        advertise: str | None = None,
        max_connections: int = 256,
        header_timeout_s: float = 10.0,
        idle_timeout_s: float = 60.0,
    ) -> None:
        if max_connections < 1 or header_timeout_s <= 0 or idle_timeout_s <= 0:
            raise ValueError("max_connections, header_timeout_s and idle_timeout_s must be positive")
        self.token = token or secrets.token_urlsafe(32)
        self.store = ShardStore(max_bytes=memory_left() // 2 if max_bytes is None else max_bytes)
        app = shard_app(self.store, self.token, idle_timeout_s=idle_timeout_s)
        self._socket = _Listener.at(host, port, max_connections)
        self.port: int = self._socket.getsockname()[1]
        name = advertise or address_for_others(host)
        scheme = "http" if ssl_context is None else "https"
        self.url = f"{scheme}://{f'[{name}]' if ':' in name else name}:{self.port}"
        protocol: Any = functools.partial(
            _Connection,
            let_in=self._socket.let_in,
            header_timeout_s=header_timeout_s,
            idle_timeout_s=idle_timeout_s,
        )
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            loop="asyncio",
            log_config=None,
            access_log=False,
            lifespan="off",
            h11_max_incomplete_event_size=_HEAD_BYTES,
        )
        config.load()
        config.ssl = ssl_context
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="shard-server", daemon=True
        )
        self._thread.start()
        remake_in_child(self)

    def after_fork(self) -> None:
        """A child does not serve: it lets go of the sockets, so that they end with its parent's."""
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in self._socket.descriptors():
            os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)

    def close(self) -> None:
        """Stop serving; idempotent."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(30)
        self._socket.close()


class _Listener(socket.socket):
    """Accepts so many connections at once of whom it does not know, the oldest of which make room for others.

    As many more are of those that were let in. What makes room keeps its descriptor until the server has seen
    that: where that is true of several, the next connection is closed at once.
    """

    limit = 0
    _strangers: dict[int, socket.socket]  # By descriptor, the oldest first.
    _guests: dict[int, socket.socket]
    _leaving: dict[int, socket.socket]

    @classmethod
    def at(cls, host: str, port: int, limit: int) -> Self:
        """Listen on an address of either family."""
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            both = host == "::" and socket.has_dualstack_ipv6()
            made = socket.create_server((host, port), family=family, dualstack_ipv6=both)
        except OSError as error:
            raise TransportError(f"no server can listen on {host} port {port}: {error}") from error
        listener = cls(fileno=made.detach())
        listener.limit, listener._strangers, listener._guests, listener._leaving = limit, {}, {}, {}
        return listener

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; if there are too many, the oldest one that was not let in is hung up on."""
        connection, address = super().accept()
        self._strangers, self._leaving = _open(self._strangers), _open(self._leaving)
        if len(self._strangers) >= self.limit:
            if len(self._leaving) >= max(8, self.limit // 8):
                connection.close()
                raise ConnectionAbortedError(f"more than {self.limit} connections")
            fd = next(iter(self._strangers))
            self._leaving[fd] = self._strangers.pop(fd)
            with contextlib.suppress(OSError):
                self._leaving[fd].shutdown(socket.SHUT_RDWR)
        self._strangers[connection.fileno()] = connection
        return connection, address

    def let_in(self, fd: int) -> bool:
        """Whether there is room for a connection whose client has shown to know the token."""
        self._guests = _open(self._guests)
        if fd not in self._guests and fd in self._strangers and len(self._guests) < self.limit:
            self._guests[fd] = self._strangers.pop(fd)
        return fd in self._guests

    def descriptors(self) -> list[int]:
        """Of the listener, and of the connections that it accepted."""
        found = (self, *self._strangers.values(), *self._guests.values(), *self._leaving.values())
        return [fd for fd in (each.fileno() for each in found) if fd >= 0]


def _open(connections: dict[int, socket.socket]) -> dict[int, socket.socket]:
    return {fd: connection for fd, connection in connections.items() if connection.fileno() >= 0}


class _Connection(H11Protocol):
    """Ends when no request comes in time, or when its client stops to take an answer."""

    def __init__(
        self,
        *args: Any,
        let_in: Callable[[int], bool],
        header_timeout_s: float,
        idle_timeout_s: float,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._fd: int = -1
        self.app_state = {**self.app_state, LET_IN: lambda: let_in(self._fd)}
        self._header_timeout_s, self._idle_timeout_s = header_timeout_s, idle_timeout_s
        self._waits_since = self._moved_at = self.loop.time()
        self._unsent, self._seen = 0, self.cycle
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._fd = transport.get_extra_info("socket").fileno()
        super().connection_made(cast("asyncio.Transport", transport))
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        if unsent != self._unsent or not unsent:
            self._unsent, self._moved_at = unsent, now
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy or unsent or self.cycle is not self._seen:
            self._waits_since, self._seen = now, self.cycle
        if now - self._waits_since > self._header_timeout_s or now - self._moved_at > self._idle_timeout_s:
            self.transport.abort()
            return
        pause = min(self._header_timeout_s, self._idle_timeout_s) / 4
        self._timer = self.loop.call_later(pause, self._watch)
