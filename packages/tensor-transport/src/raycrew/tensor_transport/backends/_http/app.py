"""The server's side of the HTTP backend: an ASGI application over a store in memory."""

import hmac
import json
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from types import UnionType
from typing import Any

import numpy as np
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from raycrew.tensor_transport._bytes import frame, remake_in_child
from raycrew.tensor_transport._rows import Rows, ShardRead, TensorShardInfo, dtype_name
from raycrew.tensor_transport.backends._http.body import Body, read_header, read_tensors
from raycrew.tensor_transport.backends._ledger import Ledger, LedgerStore
from raycrew.tensor_transport.errors import DecodeError, TransportError
from raycrew.tensor_transport.protocols import Bytes

CHUNK_BYTES = 1 << 20
LET_IN = "raycrew_let_in"
"""What a server's state may have: a function without arguments; whether there is room for a client that knows
the token."""
_REQUEST_BYTES = 64 << 20

Handler = Callable[[Request], Awaitable[Response]]


class NoRoomError(TransportError):
    """A store would hold more than it may."""


class ShardStore(LedgerStore):
    """Tensors by shard id, in the memory of this process; thread-safe.

    Args:
        max_bytes: Refuse to hold more; None for no limit.
    """

    def __init__(self, *, max_bytes: int | None = None) -> None:
        super().__init__()
        self.epoch = uuid.uuid4().hex
        self._max_bytes = max_bytes
        self._tensors: dict[str, torch.Tensor] = {}
        self._arriving = 0
        self._lock = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """A child's store is another one, and empty: handles on its parent's are stale there."""
        self.epoch = uuid.uuid4().hex
        self._tensors, self._ledger, self._arriving = {}, Ledger(), 0
        self._lock = threading.Lock()

    @contextmanager
    def room_for(self, size_bytes: int) -> Iterator[None]:
        """So many more bytes will be held: nobody else may take their room meanwhile.

        Raises:
            NoRoomError: There is none.
        """
        with self._lock:
            taken = self._ledger.stats().held_bytes + self._arriving
            if self._max_bytes is not None and taken + size_bytes > self._max_bytes:
                message = f"no room for {size_bytes} bytes: {taken} of max_bytes={self._max_bytes} are taken"
                raise NoRoomError(f"{message}; release shards, or expire() old steps")
            self._arriving += size_bytes
        try:
            yield
        finally:
            with self._lock:
                self._arriving -= size_bytes

    def keep(self, tensors: dict[str, torch.Tensor], step: int | None) -> None:
        """Take tensors over; those that are held already stay as they are."""
        with self._lock:
            for shard_id, tensor in tensors.items():
                if shard_id not in self._tensors:
                    self._tensors[shard_id] = tensor
                    self._ledger.add(shard_id, tensor.nbytes, step)

    def get(self, shard_id: str) -> torch.Tensor | None:
        """A tensor, None where it is gone."""
        return self._tensors.get(shard_id)

    def _forget(self, shard_ids: Sequence[str]) -> None:
        with self._lock:
            for shard_id in shard_ids:
                self._tensors.pop(shard_id, None)


def shard_app(store: ShardStore, token: str, *, idle_timeout_s: float = 60.0) -> Starlette:
    """An ASGI application, to be mounted or run, that serves a store to whoever knows the token.

    `POST /shards?step=` (safetensors; names are shard ids), `POST /fetch` (JSON; answers safetensors),
    `DELETE /shards` (JSON list of ids, null for all), `POST /expire` (JSON), `GET /stats`, and `GET /health`,
    the only one without a token.

    Args:
        store: What is served.
        token: What clients have to know.
        idle_timeout_s: A request's body may pause for so long; on average it comes at 64 KiB/s or faster.

    Raises:
        ValueError: The token is shorter than 16 characters.
    """
    if len(token) < 16:
        raise ValueError("the token needs at least 16 characters")
    handlers = _Handlers(store, idle_timeout_s)

    def guarded(handler: Handler) -> Handler:
        async def guard(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return _refuse(401, "wrong or missing token")
            let_in = request.scope.get("state", {}).get(LET_IN)
            if let_in is not None and not let_in():
                return _refuse(503, "there are too many connections")
            try:
                return await handler(request)
            except DecodeError as error:
                return _refuse(400, str(error))
            except NoRoomError as error:
                return _refuse(507, str(error))
            except TimeoutError:
                return _refuse(408, f"the request paused for {idle_timeout_s} s, or trickles")

        return guard

    return Starlette(
        routes=[
            Route("/health", handlers.health),
            Route("/shards", guarded(handlers.put), methods=["POST"]),
            Route("/shards", guarded(handlers.delete), methods=["DELETE"]),
            Route("/fetch", guarded(handlers.fetch), methods=["POST"]),
            Route("/expire", guarded(handlers.expire), methods=["POST"]),
            Route("/stats", guarded(handlers.stats)),
        ]
    )


class _Handlers:
    """What each request does to the store."""

    def __init__(self, store: ShardStore, idle_timeout_s: float) -> None:
        self._store, self._idle_timeout_s = store, idle_timeout_s

    async def health(self, _: Request) -> Response:
        return JSONResponse({"epoch": self._store.epoch})

    async def put(self, request: Request) -> Response:
        text = request.query_params.get("step")
        step = None if text is None else _integer(text, "step")
        body = Body(request, self._idle_timeout_s)
        entries = await read_header(body)
        size = sum(entry.size_bytes for entry in entries)
        length = request.headers.get("content-length")
        if length is not None and _integer(length, "content-length") != body.taken + size:
            raise DecodeError(
                f"a body of {length} bytes is not the {body.taken + size} that its header describes"
            )
        with self._store.room_for(size):
            self._store.keep(await read_tensors(body, entries), step)
        return JSONResponse({"epoch": self._store.epoch}, status_code=201)

    async def fetch(self, request: Request) -> Response:
        wanted = await self._json(request)
        tensors: dict[str, torch.Tensor] = {}
        for i, (shard_id, rows, columns) in enumerate(_reads(wanted)):
            stored = self._store.get(shard_id) if wanted.get("epoch") == self._store.epoch else None
            if stored is None:
                return JSONResponse({"gone": shard_id, "epoch": self._store.epoch}, status_code=410)
            tensors[str(i)] = _part(stored, shard_id, rows, columns)
        start, runs = frame(tensors)
        size = len(start) + sum(run.size for run in runs)
        return StreamingResponse(
            _chunks(start, runs),
            headers={"content-length": str(size)},
            media_type="application/octet-stream",
        )

    async def delete(self, request: Request) -> Response:
        ids = await self._json(request, list | None)
        if ids is None:
            return JSONResponse({"released": self._store.clear()})
        return JSONResponse({"released": self._store.release([i for i in ids if isinstance(i, str)])})

    async def expire(self, request: Request) -> Response:
        before = (await self._json(request)).get("before_step")
        if type(before) is not int:
            raise DecodeError("before_step is not an integer")
        return JSONResponse({"released": self._store.expire(before)})

    async def stats(self, _: Request) -> Response:
        return JSONResponse(asdict(self._store.stats()))

    async def _json(self, request: Request, kind: type | UnionType = dict) -> Any:
        raw = await Body(request, self._idle_timeout_s).read_all(_REQUEST_BYTES)
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"the request is no JSON: {error}") from error
        if not isinstance(value, kind):
            raise DecodeError(f"the request is no JSON {getattr(kind, '__name__', kind)}")
        return value


def _reads(wanted: dict[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    reads = wanted.get("reads")
    if not isinstance(reads, list):
        raise DecodeError("reads is not a list")
    for read in reads:
        match read:
            case [str(shard_id), rows, columns]:
                yield shard_id, rows, columns
            case _:
                raise DecodeError(f"a read is [shard id, rows, columns], got {read!r:.80}")


def _part(stored: torch.Tensor, shard_id: str, rows: Any, columns: Any) -> torch.Tensor:
    """Rows as {"range": [a, b]} or a list of numbers, columns as [a, b], None for all."""
    shard = TensorShardInfo("", shard_id, "", "", dtype_name(stored.dtype), tuple(stored.shape))
    try:
        window = None if columns is None else _window(columns, stored.shape[1])
        return ShardRead(shard, _rows(rows, stored), window).of(stored).contiguous()
    except (IndexError, TypeError, ValueError, OverflowError) as error:
        raise DecodeError(f"shard {shard_id} of shape {list(stored.shape)}: {error}") from error


def _rows(rows: Any, stored: torch.Tensor) -> Rows | None:
    match rows:
        case None:
            return None
        case {"range": window}:
            return slice(*_window(window, stored.shape[0]))
        case list():
            numbers = np.array(rows) if rows else np.empty(0, np.int64)
            if numbers.dtype.kind != "i" or numbers.ndim != 1:
                raise TypeError("rows are whole numbers")
            if len(numbers) and not (numbers.min() >= 0 and numbers.max() < stored.shape[0]):
                raise IndexError(f"rows {numbers.min()}..{numbers.max()} do not exist")
            return numbers
        case _:
            raise TypeError("rows are a range or a list")


def _window(given: Any, length: int) -> tuple[int, int]:
    match given:
        case [int(start), int(stop)] if 0 <= start <= stop <= length:
            return start, stop
        case _:
            raise IndexError(f"{given!r:.80} is not within 0..{length}")


async def _chunks(start: bytes, runs: list[Bytes]) -> AsyncIterator[bytes | memoryview]:
    yield start
    for run in runs:
        view = run.data
        for offset in range(0, len(view), CHUNK_BYTES):
            yield view[offset : offset + CHUNK_BYTES]


def _integer(text: str | None, name: str) -> int:
    try:
        return int(text or "")
    except ValueError:
        raise DecodeError(f"{name} is no integer: {text!r}") from None


def _refuse(status: int, message: str) -> Response:
    # What is left of the request is not waited for.
    return JSONResponse({"error": message}, status_code=status, headers={"connection": "close"})


def check_answer(status: int, body: bytes, url: str) -> None:
    """Raise what an answer that is no success means.

    Raises:
        TransportError: With the server's message.
    """
    if status >= 400:
        text = body[:500].decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):
            text = json.loads(body)["error"]
        raise TransportError(f"{url} answered {status}: {text}")
