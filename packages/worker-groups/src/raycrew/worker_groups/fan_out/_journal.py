"""What a process writes down while it works: its position, and every finished item at once.

A memory file that the supervising process reads only when a batch ends or the process has died, so an item
costs two small writes and no wake-up, and nothing finished is ever lost.
"""

import os
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

_HEAD = struct.Struct("=qd")
_FRAME = struct.Struct("=?dq")
LOADING = -1


class Finished(NamedTuple):
    """One finished item: whether the function returned, its seconds, and the pickled value or failure."""

    ok: bool
    seconds: float
    payload: bytes


class Journal:
    """The memory file behind a file descriptor that two processes share."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._end = _HEAD.size

    def reset(self) -> None:
        """Begin a batch: nothing finished, the function not loaded yet."""
        os.ftruncate(self.fd, _HEAD.size)  # never shorter: the other side may be reading the head
        self._end = _HEAD.size
        self.start(LOADING)

    def start(self, position: int) -> None:
        """Note that the item at `position` starts now."""
        os.pwrite(self.fd, _HEAD.pack(position, time.monotonic()), 0)

    def finish(self, ok: bool, seconds: float, payload: bytes) -> None:
        """Note an item's end."""
        frame = memoryview(_FRAME.pack(ok, seconds, len(payload)) + payload)
        while frame:
            written = os.pwrite(self.fd, frame, self._end)
            self._end += written
            frame = frame[written:]

    def current(self) -> tuple[int, float]:
        """Position of the item that is running, and when it started (monotonic clock)."""
        position, started = _HEAD.unpack(os.pread(self.fd, _HEAD.size, 0))
        return position, started

    def read(self) -> bytes:
        """Everything finished so far, for `finished`."""
        size = os.fstat(self.fd).st_size - _HEAD.size
        parts = []
        offset = _HEAD.size
        while size > 0:
            part = os.pread(self.fd, size, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            size -= len(part)
        return b"".join(parts)


def finished(data: bytes) -> Iterator[Finished]:
    """The complete entries of a journal; one that was cut short by a kill is left out."""
    offset = 0
    while offset + _FRAME.size <= len(data):
        ok, seconds, size = _FRAME.unpack_from(data, offset)
        offset += _FRAME.size
        if offset + size > len(data):
            return
        yield Finished(ok, seconds, data[offset : offset + size])
        offset += size
