"""Requests with one deadline each, to servers that were named, over connections that are kept."""

import http.client
import io
import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from raycrew.tensor_transport._bytes import remake_in_child
from raycrew.tensor_transport.backends._http.app import CHUNK_BYTES, check_answer
from raycrew.tensor_transport.errors import (
    ShardLostError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.protocols import Bytes

_MAX_IDLE = 16
_PAUSES_S = (0.05, 0.1, 0.2)
_BUSY = 503
_UNANSWERED = (ConnectionError, http.client.BadStatusLine, ssl.SSLEOFError)

_log = logging.getLogger(__name__)
MakeContext = Callable[[], ssl.SSLContext]


class Origin(NamedTuple):
    """What a token belongs to."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: object) -> "Origin":
        """The origin of a URL.

        Raises:
            ValueError: It is none of http or https.
        """
        parts = urlsplit(url if isinstance(url, str) else "")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(f"url must be http://host:port or https://host:port, got {url!r}")
        return cls(parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme])


class HttpClient:
    """Sends requests, each with the token of its server; thread-safe.

    Args:
        tokens: The token of each server, by URL; no other server is asked.
        ssl_context: Makes the context of https connections.
        timeout_s: Deadline of requests that have none of their own.
    """

    def __init__(self, tokens: Mapping[str, str], ssl_context: MakeContext | None, timeout_s: float) -> None:
        self._tokens = {Origin.of(url): token for url, token in tokens.items()}
        self._ssl_context, self._timeout_s = ssl_context, timeout_s
        self._idle: list[tuple[Origin, _Connection]] = []
        self._lock = threading.Lock()
        self._closed = False
        remake_in_child(self)

    def after_fork(self) -> None:
        """A child has connections of its own: an answer goes to whom it is for."""
        inherited, self._idle = self._idle, []
        self._lock = threading.Lock()
        for _, connection in inherited:
            connection.close()

    def close(self) -> None:
        """Close idle connections; idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    @contextmanager
    def request(
        self, url: str, method: str, path: str, body: Sequence[bytes | Bytes], timeout_s: float | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and give its answer; the connection is kept if the answer was read to its end.

        Raises:
            TransportError: The server was not named, or refuses.
            TransportTimeoutError: The deadline passed, whatever arrived until then.
            ShardLostError: The server can't be reached.
        """
        if self._closed:
            raise TransportClosedError("this HttpBackend is closed")
        origin, token = self._named(url)
        start = time.monotonic()
        deadline = start + (self._timeout_s if timeout_s is None else timeout_s)
        try:
            connection, answer = self._send(origin, token, method, urlsplit(url).path + path, body, deadline)
            try:
                if answer.status not in (200, 201, 410):
                    check_answer(answer.status, answer.read(CHUNK_BYTES), url)
                yield answer
            except BaseException:
                connection.close()
                raise
            self._keep(origin, connection, answer)
        except TransportError:
            raise
        except TimeoutError as error:
            waited = time.monotonic() - start
            raise TransportTimeoutError(f"{method} {url}{path}: no answer in {waited:.3g} s") from error
        except (OSError, http.client.HTTPException) as error:
            message = f"{url} cannot be reached: {error!r}"
            raise ShardLostError(message, node_id=urlsplit(url).netloc) from error

    def _named(self, url: str) -> tuple[Origin, str]:
        try:
            origin = Origin.of(url)
        except ValueError as error:
            raise TransportError(f"a handle names no server: {error}") from error
        if origin not in self._tokens:
            known = ", ".join(f"{o.scheme}://{o.host}:{o.port}" for o in self._tokens)
            raise TransportError(
                f"{url} is not among the servers that this backend was told of ({known}), so it is not "
                "sent their token: name it in HttpBackend(servers=...) if it is one of yours"
            )
        return origin, self._tokens[origin]

    def _send(
        self,
        origin: Origin,
        token: str,
        method: str,
        path: str,
        body: Sequence[bytes | Bytes],
        deadline: float,
    ) -> tuple["_Connection", http.client.HTTPResponse]:
        """Sending twice is harmless: puts name their shards, and the rest is the same the second time."""
        size = sum(_view(part).nbytes for part in body)
        headers = {"Authorization": f"Bearer {token}", "Content-Length": str(size)}
        pauses = iter(_PAUSES_S)
        while True:
            connection, reused = self._connection(origin, deadline)
            try:
                connection.request(method, path, body=_pieces(body), headers=headers)
                answer = connection.getresponse()
                if answer.status != _BUSY or (pause := next(pauses, None)) is None:
                    return connection, answer
                why: object = f"status {_BUSY}"
            except _UNANSWERED as error:
                connection.close()
                if reused:
                    continue  # The server closed an idle connection.
                if (pause := next(pauses, None)) is None:
                    raise
                why = repr(error)
            except BaseException:
                connection.close()
                raise
            connection.close()
            pause *= random.uniform(0.5, 1.5)
            _log.info("%s %s:%s%s: %s; again in %.2g s", method, origin.host, origin.port, path, why, pause)
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))

    def _connection(self, origin: Origin, deadline: float) -> tuple["_Connection", bool]:
        with self._lock:
            for i in reversed(range(len(self._idle))):
                if self._idle[i][0] == origin:
                    connection = self._idle.pop(i)[1]
                    connection.deadline = deadline
                    return connection, True
        return _Connection(origin, self._ssl_context, deadline), False

    def _keep(self, origin: Origin, connection: "_Connection", answer: http.client.HTTPResponse) -> None:
        with self._lock:
            if answer.isclosed() and connection.sock is not None and not self._closed:
                self._idle.append((origin, connection))
                connection = self._idle.pop(0)[1] if len(self._idle) > _MAX_IDLE else None  # type: ignore[assignment]
        if connection is not None:
            connection.close()


class _Connection(http.client.HTTPConnection):
    """Whatever it waits for, it waits until `deadline` at most."""

    def __init__(self, origin: Origin, make_context: MakeContext | None, deadline: float) -> None:
        super().__init__(origin.host, origin.port, blocksize=CHUNK_BYTES)
        self.deadline = deadline
        self._make_context = None
        if origin.scheme == "https":
            self._make_context = make_context or ssl.create_default_context

    def left_s(self) -> float:
        """Time until the deadline.

        Raises:
            TimeoutError: There is none.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline of the request passed")
        return left

    def connect(self) -> None:
        """Connect to the first address of the host that answers."""
        failed: OSError = OSError(f"{self.host} has no address")
        for family, kind, protocol, _, address in self._addresses():
            plain = socket.socket(family, kind, protocol)
            try:
                self._connect(plain, address)
            except TimeoutError:
                plain.close()
                raise
            except OSError as error:
                plain.close()
                failed = error
            except BaseException:
                plain.close()
                raise
            else:
                return
        raise failed

    def _addresses(self) -> list[Any]:
        """Those of the host; a name is looked up in a thread, as resolvers keep deadlines of their own."""
        look_up = partial(socket.getaddrinfo, self.host, self.port, type=socket.SOCK_STREAM)
        with suppress(socket.gaierror):
            return look_up(flags=socket.AI_NUMERICHOST)
        found: Future[list[Any]] = Future()
        threading.Thread(target=_settle, args=(found, look_up), name="http-look-up", daemon=True).start()
        return found.result(self.left_s())

    def _connect(self, plain: socket.socket, address: Any) -> None:
        plain.settimeout(self.left_s())
        plain.connect(address)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._make_context is not None:
            plain.settimeout(self.left_s())
            plain = self._make_context().wrap_socket(plain, server_hostname=self.host)
        self.sock = cast("socket.socket", _DeadlineSocket(self, plain))


def _settle(found: Future[list[Any]], look_up: Callable[[], list[Any]]) -> None:
    try:
        found.set_result(look_up())
    except Exception as error:  # noqa: BLE001 - raised in the thread that waits, if it still does
        found.set_exception(error)


class _DeadlineSocket:
    """The part of a socket that `http.client` uses, under the deadline of its connection."""

    def __init__(self, connection: _Connection, plain: socket.socket) -> None:
        self._connection, self._plain = connection, plain

    def sendall(self, data: Any) -> None:
        """Send everything in time."""
        rest = memoryview(data)
        while rest:
            self._plain.settimeout(self._connection.left_s())
            rest = rest[self._plain.send(rest) :]

    def makefile(self, mode: str) -> io.BufferedReader:  # noqa: ARG002 - always "rb"
        """What an answer is read from."""
        raw = self._plain.makefile("rb", buffering=0)
        return io.BufferedReader(_DeadlineReader(self._connection, self._plain, cast("io.RawIOBase", raw)))

    def close(self) -> None:
        """Close it; an answer that is being read keeps it open."""
        self._plain.close()


class _DeadlineReader(io.RawIOBase):
    def __init__(self, connection: _Connection, plain: socket.socket, raw: io.RawIOBase) -> None:
        self._connection, self._plain, self._raw = connection, plain, raw

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int | None:
        self._plain.settimeout(self._connection.left_s())
        count: int | None = self._raw.readinto(target)
        return count

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


def _view(part: bytes | Bytes) -> memoryview:
    return memoryview(part) if isinstance(part, bytes) else part.data


def _pieces(body: Sequence[bytes | Bytes]) -> Iterator[memoryview]:
    for part in body:
        view = _view(part)
        for offset in range(0, len(view), CHUNK_BYTES):
            yield view[offset : offset + CHUNK_BYTES]
