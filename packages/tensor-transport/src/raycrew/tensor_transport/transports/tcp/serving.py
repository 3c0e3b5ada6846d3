"""The listener of a TCP transport: one socket, a thread for each connection, all ended by `close`."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from raycrew.tensor_transport.errors import TransportError
from raycrew.tensor_transport.protocols import Bytes
from raycrew.tensor_transport.transports.tcp.wire import (
    GONE,
    HERE,
    WRONG_SIZE,
    HangupError,
    Request,
    next_batch,
    welcome,
)

_log = logging.getLogger(__name__)
_JOIN_S = 30.0
_GREETING_S = 10.0
_PIECE = 4 << 20

Find = Callable[[bytes], Bytes | None]


class Listener:
    """Answers requests for bytes that `find` knows by their key.

    Args:
        host: Address to listen on.
        port: Port, 0 for any free one.
        token: What clients have to prove that they know.
        find: The bytes of a key, None where they were withdrawn.
        max_connections: Of clients that know the token, those above it are hung up on. As many others may be
            about to prove it: where there are more, the oldest of those makes room, so that strangers who
            connect and say nothing keep nobody out.
        idle_s: A client that takes no bytes, or sends no request, for so long is hung up on.

    Raises:
        TransportError: The address can't be had.
    """

    def __init__(
        self, host: str, port: int, token: bytes, find: Find, *, max_connections: int, idle_s: float
    ) -> None:
        self._token, self._find = token, find
        self._max_connections, self._idle_s = max_connections, idle_s
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            both = host == "::" and socket.has_dualstack_ipv6()
            self._socket = socket.create_server((host, port), family=family, dualstack_ipv6=both)
        except OSError as error:
            raise TransportError(f"nothing can listen on {host} port {port}: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._closing = False
        self._open: dict[socket.socket, threading.Thread] = {}
        self._guests: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._thread = threading.Thread(target=self._accept, name="tcp-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody, and wait until no thread is left; idempotent."""
        with self._lock:
            self._closing = True
            threads = [self._thread, *self._open.values()]
            for sock in (self._socket, *self._open):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(_JOIN_S)
        self._socket.close()

    def let_go(self) -> None:
        """Close a forked child's copies of the sockets; connections of the parent go on."""
        for sock in (self._socket, *self._open):
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._socket.accept()
            except OSError as error:
                if self._closing:
                    return
                _log.warning("a connection was not accepted: %s", error)
                threading.Event().wait(0.1)
                continue
            with self._lock:
                if self._closing:
                    sock.close()
                    continue
                self._make_room()
                self._begin(sock, peer)

    def _make_room(self) -> None:
        if len(self._strangers) >= self._max_connections:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)

    def _let_in(self, sock: socket.socket) -> bool:
        """Whether there is room for one that has proven to know the token."""
        with self._lock:
            if sock not in self._strangers or len(self._guests) >= self._max_connections:
                return False
            del self._strangers[sock]
            self._guests.add(sock)
            return True

    def _begin(self, sock: socket.socket, peer: object) -> None:
        serving = threading.Thread(target=self._serve, args=(sock, peer), name="tcp-serving", daemon=True)
        self._open[sock], self._strangers[sock] = serving, None
        try:
            serving.start()
        except RuntimeError as error:  # Later ones can be served once there are threads again.
            _log.warning("the connection of %s was not served: %s", peer, error)
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        del self._open[sock]
        self._strangers.pop(sock, None)
        self._guests.discard(sock)
        sock.close()

    def _serve(self, sock: socket.socket, peer: object) -> None:
        try:
            sock.settimeout(_GREETING_S)
            if not welcome(sock, self._token, lambda: self._let_in(sock)):
                _log.warning("refused %s, which does not know the token", peer)
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(self._idle_s)
            while requests := next_batch(sock):
                for request in requests:
                    self._answer(sock, request)
        except (HangupError, OSError) as error:
            _log.debug("the connection of %s ended: %s", peer, error)
        finally:
            with self._lock:
                self._forget(sock)

    def _answer(self, sock: socket.socket, request: Request) -> None:
        data = self._find(request.key)
        end = request.offset + request.size_bytes
        if data is None or end > data.nbytes:
            sock.sendall(bytes([GONE if data is None else WRONG_SIZE]))
            return
        sock.sendall(bytes([HERE]))
        view = data.data[request.offset : end]
        for start in range(0, len(view), _PIECE):  # A timeout is for each piece.
            sock.sendall(view[start : start + _PIECE])
        sock.sendall(bytes([HERE if self._find(request.key) is data else GONE]))
