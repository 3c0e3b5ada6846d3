"""A request's body, and an answer to it: whole, or as events of a stream."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import Any

from generation.openai.errors import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientGoneError(Exception):
    """The client has closed its connection."""


class Reply:
    """The answer to a request.

    Args:
        send: Of ASGI.
    """

    def __init__(self, send: Send) -> None:
        self._send, self._streams = send, False

    async def whole(
        self, value: Mapping[str, Any], status: int = 200, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Answer with JSON."""
        body = json.dumps(value, allow_nan=False).encode()
        about = [("content-type", "application/json"), ("content-length", str(len(body)))]
        await self._begin(status, [*about, *headers])
        await self._send({"type": "http.response.body", "body": body})

    async def event(self, value: Mapping[str, Any]) -> None:
        """Tell a piece of a stream, which begins with the first one."""
        if not self._streams:
            self._streams = True
            await self._begin(200, [("content-type", "text/event-stream"), ("cache-control", "no-cache")])
        await self._tell(json.dumps(value, allow_nan=False))

    async def end(self) -> None:
        """End the stream as one that is whole."""
        await self._tell("[DONE]")
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: ApiError) -> None:
        """Tell an error: by the answer's status, or where a stream has begun, as its last event."""
        if not self._streams:
            headers = [("x-raycrew-outcome", "surely-not-run")] if error.is_not_run else []
            await self.whole(error.body, error.status, headers)
            return
        await self._tell(json.dumps(error.body))
        await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, status: int, headers: list[tuple[str, str]]) -> None:
        encoded = [(name.encode(), value.encode()) for name, value in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _tell(self, text: str) -> None:
        await self._send(
            {"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True}
        )


async def body_of(receive: Receive, most_bytes: int) -> bytes:
    """The body of a request.

    Raises:
        ApiError: It is too long.
        ClientGoneError: Its client has gone.
    """
    held, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        held += message.get("body", b"")
        more = message.get("more_body", False)
        if len(held) > most_bytes:
            raise ApiError(413, f"the body has more than {most_bytes} bytes", code="too_long")
    return bytes(held)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do something that is cancelled should the client go away.

    Raises:
        ClientGoneError: It has.
    """
    doing, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGoneError
        await doing
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
