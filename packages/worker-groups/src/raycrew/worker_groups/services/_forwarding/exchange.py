"""One request to one server and its answer, on a connection of their own."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import h11

from raycrew.worker_groups.services._asgi import end_connection

_READ_BYTES = 1 << 16
_HEAD_BYTES = 256 << 10
_CONNECT_S = 5.0


class SurelyNotRunError(Exception):
    """Nothing of the request has got to the server."""


class PerhapsRunError(Exception):
    """The server may have run the request, and its answer did not come, or not to the end."""


class Exchange:
    """A request under way; `close` ends it wherever it is.

    Attributes:
        has_begun: Whether anything of the request may have got to the server.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self._protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        self._writer: asyncio.StreamWriter | None = None
        self._sending: asyncio.Task[None] | None = None
        self._body_error: Exception | None = None

    async def begin(
        self, host: str, port: int, request: h11.Request, body: AsyncIterator[bytes]
    ) -> h11.Response:
        """Send a request; gives the head of its answer, perhaps before all of the body was sent.

        Raises:
            SurelyNotRunError: The server can't be connected to.
            PerhapsRunError: No answer came.
            Exception: Whatever the body raises.
        """
        try:
            async with asyncio.timeout(_CONNECT_S):
                self._reader, self._writer = await asyncio.open_connection(host, port)
        except OSError as error:
            raise SurelyNotRunError(f"it can't be connected to: {error or 'it does not answer'}") from error
        self.has_begun = True
        self._sending = asyncio.create_task(self._send(self._writer, request, body))
        while not isinstance(event := await self._next_event(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise PerhapsRunError("it closed the connection without an answer")
        return event

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body of the answer.

        Raises:
            PerhapsRunError: It broke off.
        """
        while not isinstance(event := await self._next_event(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise PerhapsRunError("its answer broke off")
            yield bytes(event.data)

    def close(self) -> None:
        """Let the connection go; the server is told by that, should it still be at work."""
        if self._sending is not None:
            self._sending.cancel()
        if self._writer is not None:
            end_connection(self._writer.get_extra_info("socket"))
            self._writer.transport.abort()

    async def _next_event(self) -> object:
        try:
            while (event := self._protocol.next_event()) is h11.NEED_DATA:
                self._protocol.receive_data(await self._reader.read(_READ_BYTES))
        except (OSError, h11.ProtocolError) as error:
            if self._body_error is not None:
                raise self._body_error from None
            raise PerhapsRunError(f"its answer can't be had: {error or type(error).__name__}") from error
        if self._body_error is not None and not isinstance(event, h11.Data):  # the end is that of this side
            raise self._body_error
        return event

    async def _send(
        self, writer: asyncio.StreamWriter, request: h11.Request, body: AsyncIterator[bytes]
    ) -> None:
        """Send all; a server that wants no more of it says so in its answer, which is what counts."""
        try:
            with suppress(OSError):
                self._write(writer, [request])
                async for piece in body:
                    self._write(writer, [h11.Data(data=piece)])
                    await writer.drain()
                self._write(writer, [h11.EndOfMessage()])
                await writer.drain()
        except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
            self._body_error = error
            writer.transport.abort()

    def _write(self, writer: asyncio.StreamWriter, events: Sequence[h11.Event]) -> None:
        for event in events:
            if data := self._protocol.send(event):
                writer.write(data)
