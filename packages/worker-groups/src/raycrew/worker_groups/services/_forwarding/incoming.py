"""A client's request: its head, the part of its body that is held, and the rest as it comes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from raycrew.worker_groups.services._asgi import HEAD_BYTES, Receive
from raycrew.worker_groups.services._forwarding.headers import (
    Headers,
    content_length,
    has_two_lengths,
    is_idempotent,
    is_web_socket,
)


class RefusedError(Exception):
    """A request that goes to no server.

    Attributes:
        status: What it is answered with.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientGoneError(Exception):
    """The client has closed its connection."""


class Incoming:
    """A request as it comes in.

    Args:
        scope: Its head.
        receive: Gives its body.
        most_bytes: How long its body may be.

    Attributes:
        method: Its method.
        headers: Its headers.
        target: Path and query.
        held: The part of the body that is held.
        is_whole: Whether that is all of it.

    Raises:
        RefusedError: It is too long, or nothing to be passed on.
    """

    def __init__(self, scope: Mapping[str, Any], receive: Receive, most_bytes: int) -> None:
        self._receive, self._most_bytes, self._taken = receive, most_bytes, 0
        self.method: str = scope["method"]
        self.headers: Headers = list(scope["headers"])
        query: bytes = scope["query_string"]
        self.target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        self.held, self.is_whole = b"", False
        self._ended = asyncio.Event()
        if not self.target.startswith(b"/") or self.method == "CONNECT":
            raise RefusedError(400, "requests are for paths")
        if self.method == "TRACE" or is_web_socket(self.headers):  # the one would show a server's token
            raise RefusedError(501, "neither web sockets nor TRACE are passed on")
        if has_two_lengths(self.headers):
            raise RefusedError(400, "a body has a length or comes in chunks, not both")
        if len(self.target) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES:
            raise RefusedError(431, f"a head of more than {HEAD_BYTES} bytes")
        if (length := content_length(self.headers)) is not None and length > most_bytes:
            raise RefusedError(413, f"a body of {length} bytes; {most_bytes} are the most")

    @property
    def may_go_again(self) -> bool:
        """Whether it may be sent twice, and can be."""
        return self.is_whole and is_idempotent(self.method, self.headers)

    @property
    def length(self) -> int | None:
        """How long its body is; None where that is not known."""
        return len(self.held) if self._ended.is_set() else content_length(self.headers)

    async def hold(self, most_bytes: int) -> None:
        """Read the body, as far as so much of it."""
        held = bytearray()
        while not self._ended.is_set() and len(held) <= most_bytes:
            held += await self._next()
        self.held, self.is_whole = bytes(held), self._ended.is_set() and len(held) <= most_bytes

    async def body(self) -> AsyncIterator[bytes]:
        """The body; where it is not whole, once only."""
        if self.held:
            yield self.held
        while not self._ended.is_set():
            if piece := await self._next():
                yield piece

    async def gone(self) -> None:
        """Wait until the client has closed its connection; only once the body has ended."""
        await self._ended.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client has closed its connection")
        piece: bytes = message.get("body", b"")
        self._taken += len(piece)
        if self._taken > self._most_bytes:
            raise RefusedError(413, f"a body of more than {self._most_bytes} bytes")
        if not message.get("more_body", False):
            self._ended.set()
        return piece
