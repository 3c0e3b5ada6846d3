"""A server in a thread of this process, behind a token, on a port that is leased."""

import logging
import threading
import time
from types import TracebackType
from typing import NoReturn, Self

from raycrew.cluster_core import PortLease, lease_ports
from raycrew.worker_groups.services._addresses import as_known, loopback_if_alone, node_address
from raycrew.worker_groups.services._asgi import App, Guard, Listener, server_of
from raycrew.worker_groups.services._endpoint import Endpoint, url_of
from raycrew.worker_groups.services._options import check_number, made_token
from raycrew.worker_groups.services.errors import ServiceClosedError, ServiceError

logger = logging.getLogger(__name__)

_START_S, _END_S = 10.0, 10.0
_LAST_PORT = 65535


class ServedInThread:
    """Serves an application from when it is made; a context manager.

    Args:
        app: The application.
        token: What clients have to know.
        host: Address to listen on; by default loopback while the Ray cluster is one node, else this node's.
        port: Port to listen on; by default one that is leased.
        max_connections: Connections at once.
        header_timeout_s: How long the head of a request may take.
        idle_timeout_s: How long a request may pause, and an answer that is not taken.

    Raises:
        TypeError: One of them is of a wrong kind.
        ValueError: One is out of range.
        ServiceError: The address can't be had.
    """

    def __init__(
        self,
        app: App,
        token: str | None,
        host: str | None,
        port: int | None,
        max_connections: int,
        header_timeout_s: float,
        idle_timeout_s: float,
    ) -> None:
        _check_address(host, port)
        check_number("max_connections", max_connections, 1, whole=True)
        check_number("header_timeout_s", header_timeout_s, 1e-3)
        check_number("idle_timeout_s", idle_timeout_s, 1e-3)
        self._lease, self._listener, address = _listening(host, port, max_connections)
        self._server = server_of(
            Guard(app, token),
            websockets=False,
            lifespan=False,
            header_timeout_s=header_timeout_s,
            idle_timeout_s=idle_timeout_s,
        )
        self._endpoint = Endpoint(url_of(address, self._listener.getsockname()[1]), token)
        self._closed = False
        self._thread = threading.Thread(
            target=self._server.run, args=([self._listener],), name="raycrew-http", daemon=True
        )
        self._begin()

    @property
    def endpoint(self) -> Endpoint:
        """Where it answers; it stays the same.

        Raises:
            ServiceClosedError: It was shut down.
        """
        if self._closed:
            raise ServiceClosedError(f"this {type(self).__name__} was shut down")
        return self._endpoint

    def shutdown(self) -> None:
        """End it, and requests under way with it; idempotent."""
        self._closed = True
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_END_S)
            if self._thread.is_alive():
                logger.warning("%r: its application has not ended within %g s", self, _END_S)
        self._listener.close()
        if self._lease is not None:
            self._lease.release()

    def _begin(self) -> None:
        self._thread.start()
        until = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() >= until:
                self.shutdown()
                raise ServiceError(f"the {type(self).__name__} could not be started; the log says why")
            time.sleep(0.005)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} stays where it was made; pass its endpoint on")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._endpoint.url!r}{', shut down' if self._closed else ''})"


class AppServer(ServedInThread):
    """An ASGI application of one's own, served from a thread of this process, such as a worker.

    It is kept behind its token, from clients that are slow, and to so many at once. It ends with the process,
    or before by `shutdown`; a context manager.

    Args:
        app: The application; it is told of no start and no end, and gets no web sockets.
        token: What clients have to know, as `Authorization: Bearer …`: "auto" makes one up, None has none.
        host: Address to listen on; by default loopback while the Ray cluster is one node, else the address of
            this one. "0.0.0.0" is all addresses.
        port: Port to listen on; by default one that is leased.
        max_connections: Connections at once; more are answered with 503.
        header_timeout_s: How long the head of a request may take.
        idle_timeout_s: How long a request may pause, and an answer that is not taken.

    Raises:
        ImportError: The extra `services` is not installed.
        TypeError: An option is of a wrong kind.
        ValueError: One is out of range.
        ServiceError: The address can't be had.

    Examples:
        >>> async def app(scope, receive, send):
        ...     await send({"type": "http.response.start", "status": 200})
        ...     await send({"type": "http.response.body", "body": b"well"})
        >>> with AppServer(app, token=None) as server:
        ...     urllib.request.urlopen(server.endpoint.url).read()
        b'well'
    """

    def __init__(
        self,
        app: App,
        *,
        token: str | None = "auto",
        host: str | None = None,
        port: int | None = None,
        max_connections: int = 1024,
        header_timeout_s: float = 10.0,
        idle_timeout_s: float = 60.0,
    ) -> None:
        if not callable(app):
            raise TypeError(f"an application of ASGI is a callable, not {app!r}")
        own = made_token(token)
        super().__init__(app, own, host, port, max_connections, header_timeout_s, idle_timeout_s)


def _check_address(host: object, port: object) -> None:
    if not isinstance(host, str | None):
        raise TypeError(f"host is a string or None, not {host!r}")
    if port is not None:
        check_number("port", port, 0, whole=True)
    if isinstance(port, int) and port > _LAST_PORT:
        raise ValueError(f"port is {port}; {_LAST_PORT} is the last")


def _listening(host: str | None, port: int | None, limit: int) -> tuple[PortLease | None, Listener, str]:
    """A lease of a port, a listener on it, and the address that others know it by."""
    here = host or loopback_if_alone() or node_address()
    lease = lease_ports() if port is None else None
    number = port if lease is None else lease.port
    try:
        listener = Listener.at(here, number or 0, limit)
    except (OSError, OverflowError) as error:
        if lease is not None:
            lease.release()
        raise ServiceError(f"nothing can listen on {here} port {number}: {error}") from error
    return lease, listener, as_known(here, node_address())
