"""What a process writes down while it works: its position, and every finished item at once.

A memory file that the supervising process reads only when a batch ends or the process has died, so an item
costs two small writes and no wake-up, and nothing finished is ever lost. One process writes, and whatever it
writes says whose it is: a child that an item has forked holds the same file.
"""

import errno
import os
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

INITIALIZING, LOADING = -2, -1
"""Positions before the first item's."""
_HEAD = struct.Struct("=qqqqd")
_FRAME = struct.Struct("=qqqq?dq")


class StrayMessageError(Exception):
    """A message does not come from the process that was asked, or is not about what it was asked."""


class Stamp(NamedTuple):
    """Whose a message is: the slot and the batch it belongs to, and the process that speaks."""

    slot: int
    batch: int
    pid: int


class Head(NamedTuple):
    """The item that runs: whose it is, its position in the batch, and when it started (monotonic clock)."""

    stamp: Stamp
    position: int
    started: float


class Finished(NamedTuple):
    """One finished item: whether the function returned, its seconds, and the pickled value or failure."""

    ok: bool
    seconds: float
    payload: bytes


class Journal:
    """The memory file behind a file descriptor that two processes share.

    Args:
        fd: The file.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._file = os.fstat(fd)
        self._end = _HEAD.size
        self._stamp = Stamp(0, 0, 0)

    # The process that works

    def begin(self, stamp: Stamp) -> None:
        """Begin a batch: nothing finished, nothing loaded yet."""
        self._stamp = stamp
        self.end_strays()
        os.ftruncate(self._own(), _HEAD.size)  # never shorter: the other side may be reading the head
        self._end = _HEAD.size
        self.start(INITIALIZING)

    def start(self, position: int) -> None:
        """Note that the item at `position` starts now."""
        self.end_strays()
        os.pwrite(self._own(), _HEAD.pack(*self._stamp, position, time.monotonic()), 0)

    def finish(self, position: int, ok: bool, seconds: float, payload: bytes) -> None:
        """Note the end of the item at `position`."""
        self.end_strays()
        frame = memoryview(_FRAME.pack(*self._stamp, position, ok, seconds, len(payload)) + payload)
        while frame:
            written = os.pwrite(self._own(), frame, self._end)
            self._end += written
            frame = frame[written:]

    def end_strays(self) -> None:
        """End this process if it is not the one that was asked, but a child that an item has forked."""
        if os.getpid() != self._stamp.pid:
            os._exit(1)

    def _own(self) -> int:
        """The descriptor, unless an item has closed it: another file may have its number."""
        if not os.path.samestat(os.fstat(self.fd), self._file):
            raise OSError(errno.EBADF, "an item has closed the journal")
        return self.fd

    # The process that supervises

    def head(self) -> Head | None:
        """What runs, None before the first batch."""
        data, again = self._read_head(), self._read_head()
        while data != again:  # it was being written
            data, again = again, self._read_head()
        if len(data) < _HEAD.size:
            return None
        slot, batch, pid, position, started = _HEAD.unpack(data)
        return Head(Stamp(slot, batch, pid), position, started)

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

    def _read_head(self) -> bytes:
        return os.pread(self.fd, _HEAD.size, 0)


def finished(data: bytes, stamp: Stamp, first: int = 0) -> Iterator[Finished]:
    """The complete entries of a journal; one that was cut short by a kill is left out.

    Args:
        data: What `Journal.read` gave.
        stamp: Whose the entries must be.
        first: Position of the first entry.

    Raises:
        StrayMessageError: An entry is another's, or out of its place.
    """
    for ok, seconds, start, end in _frames(data, stamp, first):
        yield Finished(ok, seconds, data[start:end])


def count_finished(data: bytes, stamp: Stamp) -> int:
    """How many complete entries `finished` would give.

    Raises:
        StrayMessageError: As `finished`.
    """
    return sum(1 for _ in _frames(data, stamp, 0))


def _frames(data: bytes, stamp: Stamp, position: int) -> Iterator[tuple[bool, float, int, int]]:
    offset = 0
    while offset + _FRAME.size <= len(data):
        slot, batch, pid, found, ok, seconds, size = _FRAME.unpack_from(data, offset)
        if (slot, batch, pid, found) != (*stamp, position) or size < 0:
            raise StrayMessageError(f"entry {position} of the journal of {stamp} is not its own")
        offset += _FRAME.size
        if offset + size > len(data):
            return
        yield ok, seconds, offset, offset + size
        offset += size
        position += 1
