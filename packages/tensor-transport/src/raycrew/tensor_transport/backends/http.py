"""Tensors in the memory of an HTTP server, for processes that share neither Ray nor a machine."""

import http.client
import json
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import torch
import uvicorn

from raycrew.tensor_transport._shards import (
    ShardRead,
    StoreStats,
    TensorShardInfo,
    dtype_name,
    lost,
    new_shard_id,
    stale,
)
from raycrew.tensor_transport.backends._http_app import CHUNK_BYTES, ShardStore, check_answer, shard_app
from raycrew.tensor_transport.backends._safetensors import frame, header_length, parse_header
from raycrew.tensor_transport.errors import (
    DecodeError,
    ShardLostError,
    StaleHandleError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.protocols import Bytes

_PIECE_BYTES = 256 << 10

__all__ = ["HttpBackend", "ShardServer", "ShardStore", "shard_app"]


class ShardServer:
    """Serves a store over HTTP from a thread of this process.

    Args:
        host: Address to bind to; loopback unless told otherwise.
        port: Port, 0 for any free one.
        token: What clients have to know; made up unless given.
        max_bytes: Refuse to hold more.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.token = token or secrets.token_urlsafe(32)
        self.store = ShardStore(max_bytes=max_bytes)
        app = shard_app(self.store, self.token)
        self._socket = socket.create_server((host, port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="shard-server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving; idempotent."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(30)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HttpBackend:
    """Stores on one server, and reads from any server that a handle names, if it has the same token.

    Tensors travel as safetensors; nothing that is read from the wire is ever unpickled.

    Args:
        url: The server that `put`, `expire` and `stats` go to, as "http://host:port", with a path where the
            application is mounted under one.
        token: Its token.
        timeout_s: Deadline of requests that have none of their own.
    """

    scheme = "http"
    gives_own_memory = True
    reads_over_network = True

    def __init__(self, url: str, token: str, *, timeout_s: float = 60.0) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(f"url must be http://host:port or https://host:port, got {url!r}")
        self._url, self._token, self._timeout_s = url.rstrip("/"), token, timeout_s
        self._node = urlsplit(url).netloc
        self._idle: dict[str, list[http.client.HTTPConnection]] = defaultdict(list)
        self._lock = threading.Lock()
        self._closed = False

    def put(self, tensors: Sequence[torch.Tensor], *, step: int | None = None) -> list[TensorShardInfo]:
        """Send tensors to the server, in one request."""
        if not tensors:
            return []
        ids = [new_shard_id() for _ in tensors]
        start, runs = frame(dict(zip(ids, tensors, strict=True)))
        path = "/shards" if step is None else f"/shards?step={step}"
        with self._request(self._url, "POST", path, (start, *runs), None) as answer:
            epoch = json.loads(answer.read())["epoch"]
        return [
            TensorShardInfo(
                self.scheme, shard_id, epoch, self._node, dtype_name(t.dtype), tuple(t.shape), self._url
            )
            for shard_id, t in zip(ids, tensors, strict=True)
        ]

    def fetch(self, reads: Sequence[ShardRead], *, timeout_s: float | None = None) -> list[torch.Tensor]:
        """The wanted parts: one request for each server, all at once."""
        owners: dict[tuple[str, str], list[int]] = defaultdict(list)
        for i, read in enumerate(reads):
            owners[read.shard.locator, read.shard.owner].append(i)
        found: dict[int, torch.Tensor] = {}
        groups = [[reads[i] for i in members] for members in owners.values()]
        if len(groups) == 1:
            answers: Iterable[list[torch.Tensor]] = [self._fetch_from(groups[0], timeout_s)]
        elif groups:
            with ThreadPoolExecutor(min(16, len(groups)), thread_name_prefix="http-fetch") as pool:
                answers = list(pool.map(lambda group: self._fetch_from(group, timeout_s), groups))
        else:
            answers = []
        for members, tensors in zip(owners.values(), answers, strict=True):
            found.update(zip(members, tensors, strict=True))
        return [found[i] for i in range(len(reads))]

    def release(self, shards: Sequence[TensorShardInfo]) -> None:
        """Delete shards on their servers; a server that is gone has forgotten them already."""
        by_url: dict[str, list[str]] = defaultdict(list)
        for shard in shards:
            by_url[shard.locator].append(shard.shard_id)
        for url, ids in by_url.items():
            try:
                self._json(url, "DELETE", "/shards", ids)
            except ShardLostError:
                continue

    def expire(self, before_step: int) -> int:
        """Release what was put on this backend's server with an earlier step."""
        return int(self._json(self._url, "POST", "/expire", {"before_step": before_step})["released"])

    @property
    def node_ids(self) -> list[str]:
        """This backend's server, as its shards name it."""
        return [self._node]

    def clear_node(self, node_id: str) -> int:
        """Release everything on this backend's server; how many shards that were."""
        if node_id != self._node:
            raise TransportError(f"this backend stores on {self._node}, not on {node_id}")
        return int(self._json(self._url, "DELETE", "/shards", None)["released"])

    def stats(self) -> StoreStats:
        """What this backend's server holds."""
        return StoreStats(**self._json(self._url, "GET", "/stats"))

    def close(self) -> None:
        """Close idle connections; idempotent."""
        with self._lock:
            self._closed = True
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._url, self._token, self._timeout_s)

    def _fetch_from(self, reads: Sequence[ShardRead], timeout_s: float | None) -> list[torch.Tensor]:
        first = reads[0].shard
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        body = json.dumps({"epoch": first.owner, "reads": [_wanted(read) for read in reads]}).encode()
        try:
            with self._request(first.locator, "POST", "/fetch", (body,), timeout_s) as answer:
                if answer.status == 410:
                    raise _stale(json.loads(answer.read()), reads)
                tensors = _read_tensors(answer, reads, deadline)
        except ShardLostError as error:
            raise lost(reads, error) from error
        try:
            return [tensors[str(i)] for i in range(len(reads))]
        except KeyError as error:
            raise DecodeError(f"{first.locator} did not send tensor {error}") from error

    def _json(self, url: str, method: str, path: str, value: object = None) -> Any:
        body = () if method == "GET" else (json.dumps(value).encode(),)
        with self._request(url, method, path, body, None) as answer:
            return json.loads(answer.read())

    @contextmanager
    def _request(
        self, url: str, method: str, path: str, body: Sequence[bytes | Bytes], timeout_s: float | None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and give its answer; the connection is kept if the answer was read to its end."""
        if self._closed:
            raise TransportClosedError("this HttpBackend is closed")
        timeout = self._timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        try:
            connection, answer = self._send(url, method, path, body, timeout)
            try:
                if answer.status not in (200, 201, 410):
                    check_answer(answer.status, answer.read(), url)
                yield answer
            except BaseException:
                connection.close()
                raise
            self._keep(url, connection, answer)
        except TimeoutError as error:
            waited = time.monotonic() - start
            raise TransportTimeoutError(f"{method} {url}{path}: no answer in {waited:.3g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ShardLostError(
                f"{url} cannot be reached: {error!r}", node_id=urlsplit(url).netloc
            ) from error

    def _send(
        self, url: str, method: str, path: str, body: Sequence[bytes | Bytes], timeout: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        headers = {
            "Authorization": f"Bearer {self._token}",
            "Content-Length": str(sum(_view(part).nbytes for part in body)),
        }
        while True:
            connection, reused = self._connection(url, timeout)
            try:
                connection.request(method, urlsplit(url).path + path, body=_pieces(body), headers=headers)
                return connection, connection.getresponse()
            except (ConnectionError, http.client.BadStatusLine):
                # The server closed an idle connection. Sending twice is harmless: puts name their shards.
                connection.close()
                if not reused:
                    raise
            except BaseException:
                connection.close()
                raise

    def _connection(self, url: str, timeout: float) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            if self._idle[url]:
                connection = self._idle[url].pop()
                connection.timeout = timeout
                if connection.sock is not None:
                    connection.sock.settimeout(timeout)
                return connection, True
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=timeout, blocksize=CHUNK_BYTES), False

    def _keep(
        self, url: str, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse
    ) -> None:
        with self._lock:
            if answer.isclosed() and connection.sock is not None and not self._closed:
                self._idle[url].append(connection)
            else:
                connection.close()


def _rebuild(url: str, token: str, timeout_s: float) -> HttpBackend:
    return HttpBackend(url, token, timeout_s=timeout_s)


def _view(part: bytes | Bytes) -> memoryview:
    return memoryview(part) if isinstance(part, bytes) else part.data


def _pieces(body: Sequence[bytes | Bytes]) -> Iterator[memoryview]:
    for part in body:
        view = _view(part)
        for offset in range(0, len(view), CHUNK_BYTES):
            yield view[offset : offset + CHUNK_BYTES]


def _wanted(read: ShardRead) -> list[Any]:
    rows: Any = None
    if isinstance(read.rows, slice):
        rows = {"range": [read.rows.start, read.rows.stop]}
    elif read.rows is not None:
        rows = read.rows.tolist()
    return [read.shard.shard_id, rows, None if read.columns is None else list(read.columns)]


def _read_tensors(
    answer: http.client.HTTPResponse, reads: Sequence[ShardRead], deadline: float
) -> dict[str, torch.Tensor]:
    """Read an answer straight into the memory of its tensors."""
    entries = parse_header(answer.read(header_length(answer.read(8))))
    targets = {str(i): read.into for i, read in enumerate(reads)}
    tensors = {}
    for entry in entries:
        target = targets.get(entry.name)
        if target is not None and (target.shape != entry.shape or target.dtype != entry.dtype):
            raise DecodeError(f"asked for {target.dtype}{list(target.shape)}, got {entry}")
        tensor = entry.empty() if target is None else target
        if entry.size_bytes:
            _fill(tensor.view(-1).view(torch.uint8).numpy().data, answer, deadline)
        tensors[entry.name] = tensor
    if answer.read(1):
        raise DecodeError("more bytes than the safetensors header describes")
    return tensors


def _fill(target: memoryview, answer: http.client.HTTPResponse, deadline: float) -> None:
    """Read in pieces: each is waited for, and an answer that trickles in ends as well."""
    filled = 0
    while filled < len(target):
        count = answer.readinto(target[filled : filled + _PIECE_BYTES])
        if not count:
            raise DecodeError(f"the answer ends after {filled} of {len(target)} bytes of a tensor")
        filled += count
        if time.monotonic() > deadline:
            raise TimeoutError(f"{filled} of {len(target)} bytes of a tensor arrived in time")


def _stale(answer: dict[str, Any], reads: Sequence[ShardRead]) -> StaleHandleError:
    shards = {read.shard.shard_id: read.shard for read in reads}
    shard = shards.get(str(answer.get("gone")), reads[0].shard)
    why = "it was released" if answer.get("epoch") == shard.owner else "its server was restarted since"
    return stale(shard, why)
