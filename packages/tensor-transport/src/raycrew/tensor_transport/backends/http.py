"""Tensors in the memory of an HTTP server, for processes that share neither Ray nor a machine."""

import http.client
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import torch

from raycrew.tensor_transport._bytes import frame, header_length, lost, parse_header, stale
from raycrew.tensor_transport._rows import (
    ShardRead,
    StoreStats,
    TensorShardInfo,
    dtype_name,
    new_shard_id,
)
from raycrew.tensor_transport.backends._http import (
    HttpClient,
    MakeContext,
    Origin,
    ShardServer,
    ShardStore,
    shard_app,
)
from raycrew.tensor_transport.errors import DecodeError, ShardLostError, StaleHandleError, TransportError

_ANSWER_BYTES = 16 << 20

__all__ = ["HttpBackend", "ShardServer", "ShardStore", "shard_app"]


class HttpBackend:
    """Stores on one server, and reads from it and from others that are named.

    Tensors travel as safetensors; nothing that is read from the wire is ever unpickled. An answer is compared
    with what was asked before memory is taken for it. A request whose connection is reset before anything of
    its answer was read is sent again, a few times.

    Args:
        url: The server that `put`, `expire` and `stats` go to, as "http://host:port", with a path where the
            application is mounted under one.
        token: Its token.
        timeout_s: Deadline of requests that have none of their own.
        servers: URLs of other servers that handles may name, with the same token, or a token for each. A
            token is sent to the host and port that it is for, and nowhere else.
        ssl_context: Makes the context of https connections, in each process that the backend is sent to; a
            function that can be pickled. The system's certificates are trusted unless given.

    Raises:
        ValueError: A URL is none.
    """

    scheme = "http"
    gives_own_memory = True
    reads_over_network = True

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = 60.0,
        servers: Mapping[str, str] | Sequence[str] = (),
        ssl_context: MakeContext | None = None,
    ) -> None:
        if isinstance(servers, str):
            raise TypeError(f"servers must be several URLs, got {servers!r}")
        Origin.of(url)
        self._url, self._token, self._timeout_s = url.rstrip("/"), token, timeout_s
        self._servers = dict(servers) if isinstance(servers, Mapping) else dict.fromkeys(servers, token)
        self._ssl_context = ssl_context
        self._client = HttpClient({**self._servers, url: token}, ssl_context, timeout_s)
        self._node = urlsplit(url).netloc

    def put(self, tensors: Sequence[torch.Tensor], *, step: int | None = None) -> list[TensorShardInfo]:
        """Send tensors to the server, in one request."""
        if not tensors:
            return []
        ids = [new_shard_id() for _ in tensors]
        start, runs = frame(dict(zip(ids, tensors, strict=True)))
        path = "/shards" if step is None else f"/shards?step={step}"
        with self._client.request(self._url, "POST", path, (start, *runs)) as answer:
            epoch = _field(_parsed(answer, self._url), "epoch", str, self._url)
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
        return self._released("POST", "/expire", {"before_step": before_step})

    @property
    def node_ids(self) -> list[str]:
        """This backend's server, as its shards name it."""
        return [self._node]

    def clear_node(self, node_id: str) -> int:
        """Release everything on this backend's server; how many shards that were."""
        if node_id != self._node:
            raise TransportError(f"this backend stores on {self._node}, not on {node_id}")
        return self._released("DELETE", "/shards", None)

    def stats(self) -> StoreStats:
        """What this backend's server holds."""
        answer = self._json(self._url, "GET", "/stats")
        try:
            return StoreStats(**answer)
        except TypeError as error:
            raise DecodeError(f"{self._url} sent no figures of a store: {error}") from error

    def close(self) -> None:
        """Close idle connections; idempotent."""
        self._client.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._url, self._token, self._timeout_s, self._servers, self._ssl_context)

    def _fetch_from(self, reads: Sequence[ShardRead], timeout_s: float | None) -> list[torch.Tensor]:
        first = reads[0].shard
        body = json.dumps({"epoch": first.owner, "reads": [_wanted(read) for read in reads]}).encode()
        try:
            with self._client.request(first.locator, "POST", "/fetch", (body,), timeout_s) as answer:
                if answer.status == 410:
                    raise _stale(_parsed(answer, first.locator), reads)
                return _read_tensors(answer, reads, first.locator)
        except ShardLostError as error:
            raise lost(reads, error) from error

    def _released(self, method: str, path: str, value: object) -> int:
        return int(_field(self._json(self._url, method, path, value), "released", int, self._url))

    def _json(self, url: str, method: str, path: str, value: object = None) -> dict[str, Any]:
        body = () if method == "GET" else (json.dumps(value).encode(),)
        with self._client.request(url, method, path, body) as answer:
            return _parsed(answer, url)


def _rebuild(
    url: str, token: str, timeout_s: float, servers: Mapping[str, str], ssl_context: MakeContext | None
) -> HttpBackend:
    return HttpBackend(url, token, timeout_s=timeout_s, servers=servers, ssl_context=ssl_context)


def _parsed(answer: http.client.HTTPResponse, url: str) -> dict[str, Any]:
    text = answer.read(_ANSWER_BYTES)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{url} answered something else than JSON: {error}") from error
    if not isinstance(value, dict):
        raise DecodeError(f"{url} answered something else than a JSON object")
    return value


def _field(answer: dict[str, Any], name: str, kind: type, url: str) -> Any:
    if type(answer.get(name)) is not kind:
        raise DecodeError(f"{url} answered without {name!r}")
    return answer[name]


def _wanted(read: ShardRead) -> list[Any]:
    rows: Any = None
    if isinstance(read.rows, slice):
        rows = {"range": [read.rows.start, read.rows.stop]}
    elif read.rows is not None:
        rows = read.rows.tolist()
    return [read.shard.shard_id, rows, None if read.columns is None else list(read.columns)]


def _read_tensors(
    answer: http.client.HTTPResponse, reads: Sequence[ShardRead], url: str
) -> list[torch.Tensor]:
    """Read an answer straight into the memory of its tensors, if they are what was asked for."""
    entries = parse_header(answer.read(header_length(answer.read(8))))
    asked = {str(i): read for i, read in enumerate(reads)}
    for entry in entries:
        read = asked.pop(entry.name, None)
        if read is None:
            raise DecodeError(f"{url} sent a tensor {entry.name!r} that was not asked for")
        if (read.shard.torch_dtype, read.shape) != (entry.dtype, entry.shape):
            want, got = (
                f"{dtype_name(d)}{list(s)}"
                for d, s in ((read.shard.torch_dtype, read.shape), (entry.dtype, entry.shape))
            )
            raise DecodeError(f"{read.shard.name}: asked for {want}, got {got} from {url}")
    if asked:
        raise DecodeError(f"{url} did not send {reads[int(next(iter(asked)))].shard.name}")
    size = sum(entry.size_bytes for entry in entries)
    if answer.length not in (None, size):
        raise DecodeError(f"{url} sends {answer.length} bytes for tensors of {size} bytes")
    tensors = {}
    for entry in entries:
        into = reads[int(entry.name)].into
        tensor = tensors[entry.name] = entry.empty() if into is None else into
        if entry.size_bytes:
            _fill(tensor.view(-1).view(torch.uint8).numpy().data, answer)
    if answer.read(1):
        raise DecodeError("more bytes than the safetensors header describes")
    return [tensors[str(i)] for i in range(len(reads))]


def _fill(target: memoryview, answer: http.client.HTTPResponse) -> None:
    filled = 0
    while filled < len(target):
        count = answer.readinto(target[filled:])
        if not count:
            raise DecodeError(f"the answer ends after {filled} of {len(target)} bytes of a tensor")
        filled += count


def _stale(answer: dict[str, Any], reads: Sequence[ShardRead]) -> StaleHandleError:
    shards = {read.shard.shard_id: read.shard for read in reads}
    shard = shards.get(str(answer.get("gone")), reads[0].shard)
    why = "it was released" if answer.get("epoch") == shard.owner else "its server was restarted since"
    return stale(shard, why)
