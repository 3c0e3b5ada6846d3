"""Bodies of requests, read into memory of the right size, from clients that must not stall."""

import asyncio
import time
from collections.abc import Sequence

import torch
from starlette.requests import Request

from raycrew.tensor_transport._bytes import Entry, header_length, parse_header
from raycrew.tensor_transport.errors import DecodeError

_SLOWEST = 64 << 10  # Bytes per second.


class Body:
    """Reads a request's body into memory of the right size, piece by piece."""

    def __init__(self, request: Request, idle_timeout_s: float) -> None:
        self._stream = request.stream()
        self._rest = memoryview(b"")
        self._idle_timeout_s, self._began_at = idle_timeout_s, time.monotonic()
        self._received = self.taken = 0

    async def read_all(self, max_bytes: int) -> bytearray:
        """Everything, if it is not more than that."""
        raw = bytearray()
        while await self._has_more():
            raw += self._rest
            self._rest = memoryview(b"")
            if len(raw) > max_bytes:
                raise DecodeError(f"a request of more than {max_bytes} bytes")
        return raw

    async def read_into(self, target: memoryview) -> None:
        """Fill memory."""
        filled = 0
        while filled < len(target):
            if not await self._has_more():
                raise DecodeError("the body ends early")
            piece = self._rest[: len(target) - filled]
            target[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._rest = self._rest[len(piece) :]
        self.taken += filled

    async def expect_end(self) -> None:
        """Raise DecodeError if there is more."""
        if await self._has_more():
            raise DecodeError("more bytes than the safetensors header describes")

    async def _has_more(self) -> bool:
        while not self._rest:
            async with asyncio.timeout(self._patience_s()):
                piece = await anext(self._stream, None)
            if piece is None:
                return False
            self._rest = memoryview(piece)
            self._received += len(piece)
        return True

    def _patience_s(self) -> float:
        """How long the next piece may take."""
        spent_s = time.monotonic() - self._began_at
        return min(self._idle_timeout_s, self._idle_timeout_s + self._received / _SLOWEST - spent_s)


async def read_header(body: Body) -> list[Entry]:
    """What a body in the safetensors format says that it holds."""
    start = bytearray(8)
    await body.read_into(memoryview(start))
    text = bytearray(header_length(bytes(start)))
    await body.read_into(memoryview(text))
    return parse_header(bytes(text))


async def read_tensors(body: Body, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
    """The tensors that follow the header, and nothing after them."""
    tensors = {}
    for entry in entries:
        tensor = entry.empty()
        if entry.size_bytes:
            await body.read_into(tensor.view(-1).view(torch.uint8).numpy().data)
        tensors[entry.name] = tensor
    await body.expect_end()
    return tensors
