"""A server in a thread of this process, which whoever can reach its port can't exhaust."""

import asyncio
import functools
import os
import secrets
import socket
import ssl
import threading
from typing import Any, Self, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from raycrew.tensor_transport._bytes import Closing, memory_left, remake_in_child
from raycrew.tensor_transport._ray import address_for_others
from raycrew.tensor_transport.backends._http.app import ShardStore, shard_app
from raycrew.tensor_transport.errors import TransportError

_HEAD_BYTES = 64 << 10


class ShardServer(Closing):
    """Serves a store over HTTP from a thread of this process.

    Connections over the limit are closed at once, and those that send no request, or take no answer, in time;
    clients of this package try again.

    Args:
        host: Address to bind to; loopback unless told otherwise. "0.0.0.0" and "::" mean all addresses; the
            URL then has that of this node.
        port: Port, 0 for any free one.
        token: What clients have to know; made up unless given.
        max_bytes: Refuse to hold more; half of the memory that is free at the start unless given.
        ssl_context: Speak https, with the certificate that was loaded into this context.
        advertise: Host name or address for the URL, where others know this one by another.
        max_connections: Connections at once.
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
            _Connection, header_timeout_s=header_timeout_s, idle_timeout_s=idle_timeout_s
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
    """Accepts so many connections at once; those above are closed before anything is read of them."""

    limit = 0

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
        listener.limit, listener._open = limit, []
        return listener

    _open: list[socket.socket]

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; as if it had been aborted, if there are too many."""
        connection, address = super().accept()
        self._open = [other for other in self._open if other.fileno() >= 0]
        if len(self._open) >= self.limit:
            connection.close()
            raise ConnectionAbortedError(f"more than {self.limit} connections")
        self._open.append(connection)
        return connection, address

    def descriptors(self) -> list[int]:
        """Of the listener, and of the connections that it accepted."""
        return [fd for fd in (self.fileno(), *(c.fileno() for c in self._open)) if fd >= 0]


class _Connection(H11Protocol):
    """Ends when no request comes in time, or when its client stops to take an answer."""

    def __init__(self, *args: Any, header_timeout_s: float, idle_timeout_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timeout_s, self._idle_timeout_s = header_timeout_s, idle_timeout_s
        self._waits_since = self._moved_at = self.loop.time()
        self._unsent, self._seen = 0, self.cycle
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
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
