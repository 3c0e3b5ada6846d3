"""An ASGI application served by uvicorn, behind a token, to clients that can't exhaust it.

A replica's server runs this file in a process of its own, and a proxy in a thread. It imports nothing of
raycrew, so that such a process needs neither Ray nor this package.
"""

import asyncio
import contextlib
import functools
import hmac
import importlib
import inspect
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Self, cast

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

HEAD_BYTES = 64 << 10
_HEAR_S = 0.1  # to hear that a client is gone and end by itself, and for the last answers to be sent
MISSING = (
    "services need uvicorn and h11, which are not installed in {where}: pip install "
    "'raycrew-worker-groups[services]'"
)

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as missing:
    raise ImportError(MISSING.format(where=sys.executable)) from missing


#: Told to a client for whom there is no place. "surely not run" is what a proxy says of such a request, too.
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"content-type: application/json\r\ncontent-length: 70\r\nconnection: close\r\n"
    b"x-raycrew-outcome: surely-not-run\r\n\r\n"
    b'{"error": "too many connections at once", "outcome": "surely not run"}'
)


class Guard:
    """An ASGI application that lets requests through to another one if they know a token.

    Args:
        app: The other one.
        token: The token; None lets all through.
        open_path: A path that may be read (GET, HEAD) without it.
    """

    def __init__(self, app: App, token: str | None, open_path: str | None = None) -> None:
        self._app, self._open_path = app, open_path
        self._wanted = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] not in ("http", "websocket") or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            # What is left of the request is not waited for.
            await answer(send, 401, {"error": "wrong or missing token"}, {"connection": "close"})

    def _may_pass(self, scope: Mapping[str, Any]) -> bool:
        if self._wanted is None:
            return True
        if scope["path"] == self._open_path and scope.get("method") in ("GET", "HEAD"):
            return True
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._wanted)


async def answer(send: Send, status: int, value: object, headers: Mapping[str, str] | None = None) -> None:
    """Answer with JSON.

    Raises:
        TypeError: It can't be told as JSON.
        ValueError: It can't, for it has a NaN or an infinity, or contains itself.
    """
    body = json.dumps(value, allow_nan=False).encode()
    head = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.encode(), text.encode("latin-1")) for name, text in head.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


class Listener(socket.socket):
    """Accepts so many connections at once; those above are told so, and closed."""

    limit = _pid = 0
    _open: list[socket.socket]

    @classmethod
    def at(cls, host: str, port: int, limit: int) -> Self:
        """Listen on an address of either family.

        Raises:
            OSError: It can't be had.
        """
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        both = host == "::" and socket.has_dualstack_ipv6()
        backlog = min(limit, 2048)
        made = socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=both)
        listener = cls(fileno=made.detach())
        listener.limit, listener._open, listener._pid = limit, [], os.getpid()
        return listener

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; as if it had been aborted, if there are too many."""
        connection, address = super().accept()
        self._open = [other for other in self._open if other.fileno() >= 0]
        if len(self._open) >= self.limit:
            _turn_away(connection)
            raise ConnectionAbortedError(f"more than {self.limit} connections")
        self._open.append(connection)
        return connection, address

    def close(self) -> None:
        """Listen no more, whatever children were forked meanwhile; in such a child, let go of it."""
        if self._pid == os.getpid():
            end_connection(self)
        super().close()


def end_connection(connection: Any) -> None:
    """End a connection, whatever children were forked meanwhile: closing it ends only this process's part."""
    with contextlib.suppress(OSError, AttributeError):
        connection.shutdown(socket.SHUT_RDWR)


def _turn_away(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(FULL)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(HEAD_BYTES)  # what is not read resets the connection when it is closed


class Connection(H11Protocol):
    """Ends when no request comes in time, or when its client stops to send one, or to take an answer."""

    def __init__(self, *args: Any, header_timeout_s: float, idle_timeout_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.access_log = False
        self._header_timeout_s, self._idle_timeout_s = header_timeout_s, idle_timeout_s
        self._waits_since = self._moved_at = self._heard_at = self.loop.time()
        self._unsent, self._seen = 0, self.cycle
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to look after it."""
        super().connection_made(cast("asyncio.Transport", transport))
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop that."""
        self._leave_alone()
        end_connection(self.transport.get_extra_info("socket"))
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Leave it to the protocol that has it from now on."""
        self._leave_alone()
        super().handle_websocket_upgrade(event)

    def data_received(self, data: bytes) -> None:
        """Note that its client has sent something; what comes after its last request is nothing."""
        self._heard_at = self.loop.time()
        if self.conn.their_state is not h11.MUST_CLOSE:
            super().data_received(data)

    def handle_events(self) -> None:
        """Take in what was sent; go on to read, as the client's end is heard only so, while there is room."""
        super().handle_events()
        is_whole = self.cycle is not None and not self.cycle.more_body
        if is_whole and len(self.conn.trailing_data[0]) < HEAD_BYTES:
            self.flow.resume_reading()

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way, whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _leave_alone(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        if unsent != self._unsent or not unsent:
            self._unsent, self._moved_at = unsent, now
        busy = self.is_busy
        if busy or unsent or self.cycle is not self._seen:
            self._waits_since, self._seen = now, self.cycle
        stalls = busy and self.cycle.more_body and self.transport.is_reading()
        since = min(self._moved_at, self._heard_at if stalls else now)
        if now - self._waits_since > self._header_timeout_s or now - since > self._idle_timeout_s:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(min(self._header_timeout_s, self._idle_timeout_s) / 4, self._look)


class Server(uvicorn.Server):
    """Ends what is under way with its connection once its time is over; answers that are complete are sent.

    Args:
        config: What to serve.
        grace_s: How long requests under way may take once it is to end.
    """

    def __init__(self, config: uvicorn.Config, grace_s: float) -> None:
        super().__init__(config)
        self._grace_s = grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve no more; waits for connections and requests, which end in time."""
        ending = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_requests(self) -> None:
        await asyncio.sleep(self._grace_s)
        cancelled: set[asyncio.Task[None]] = set()
        last: set[Any] = set()
        while True:  # for one may have been accepted meanwhile
            for connection in list(self.server_state.connections):
                if connection in last or _is_busy(connection):
                    connection.transport.abort()
                last.add(connection)
            await asyncio.sleep(_HEAR_S)
            for task in self.server_state.tasks - cancelled:
                task.cancel()
                cancelled.add(task)


def _is_busy(connection: Any) -> bool:
    """Whether there is more to come than what is being sent already."""
    return not isinstance(connection, Connection) or connection.is_busy


def server_of(
    app: App,
    *,
    websockets: bool,
    lifespan: bool,
    header_timeout_s: float = 10.0,
    idle_timeout_s: float = 60.0,
    grace_s: float = 0.0,
) -> Server:
    """A server of an application, to be run on a `Listener`.

    Args:
        app: The application.
        websockets: Whether requests may become web sockets.
        lifespan: Whether the application is told of the server's start and end.
        header_timeout_s: A connection without a request under way has so long to send the head of one.
        idle_timeout_s: A request may pause for so long while it is sent, and an answer while it is taken.
        grace_s: How long requests under way may take once the server is to end; then they end without an
            answer, and the application is told of the end soon after, also where they go on.
    """
    limits = {"header_timeout_s": header_timeout_s, "idle_timeout_s": idle_timeout_s}
    config = uvicorn.Config(
        app,
        http=cast("Any", functools.partial(Connection, **limits)),
        ws="auto" if websockets else "none",
        loop="asyncio",
        interface="asgi3",
        lifespan="auto" if lifespan else "off",
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_graceful_shutdown=cast("Any", grace_s + 2 * _HEAR_S if grace_s else None),
    )
    return Server(config, grace_s)


def load(path: str) -> App:
    """The application that a path names, or that the function which it names makes.

    Raises:
        Exception: Whatever its module or that function raises.
        TypeError: It is none.
    """
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    made = found() if _takes(found, 0) else found
    if not _takes(made, 3, if_unknown=True):
        raise TypeError(f"{path} is neither an ASGI application nor a function that makes one: {made!r:.200}")
    return cast("App", made)


def _takes(found: Any, arguments: int, *, if_unknown: bool = False) -> bool:
    """Whether it can be called so: an application with three arguments, what makes one with none."""
    if not callable(found):
        return False
    try:
        inspect.signature(found).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:
        return if_unknown
    return True


def main() -> None:
    """Serve what the standard input says, as JSON; until a signal."""
    told = json.load(sys.stdin)
    sys.path[:] = [*told["path"], *(entry for entry in sys.path if entry not in told["path"])]
    guard = Guard(load(told["app"]), told["token"], told["open_path"])
    listener = Listener.at(told["host"], told["port"], told["max_connections"])
    server_of(guard, websockets=True, lifespan=True, grace_s=0.7 * told["grace_s"]).run([listener])


if __name__ == "__main__":
    main()
