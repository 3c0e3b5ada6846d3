"""Arenas read by those who only read: into buffers of their own, or in place."""

import fcntl
import mmap
import os
import threading
import time
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raycrew.tensor_transport._bytes.closing import Closing
from raycrew.tensor_transport._bytes.shared.arena_files import HEADER_BYTES, RELEASED_IN, SIZE, Header
from raycrew.tensor_transport._bytes.shared.forks import remake_in_child
from raycrew.tensor_transport._bytes.shared.own_files import open_own, try_lock
from raycrew.tensor_transport.errors import TransportTimeoutError
from raycrew.tensor_transport.protocols import Bytes

_WORD = 8


class Run(NamedTuple):
    """Bytes in one generation of an arena."""

    generation: int
    offset: int
    slot: int
    size_bytes: int


class ReadOnlyMap(mmap.mmap):
    """An arena in place, under a lease that lives as long as the mapping."""


class ArenaReader(Closing):
    """An arena, open under a lease: its owner does not use it anew meanwhile.

    Raises:
        FileNotFoundError: It is gone.
        TransportTimeoutError: Its owner held it for longer than `timeout_s`.
    """

    def __init__(self, path: Path, timeout_s: float | None = None) -> None:
        self.path = path
        self._fd = open_own(path, os.O_RDWR)
        try:
            _share(self._fd, path, timeout_s)
            self._size = os.fstat(self._fd).st_size
            self._generation, self._used = self._words(0, 2) if self._size > HEADER_BYTES else (0, 0)
        except BaseException:
            os.close(self._fd)
            raise

    def why_gone(self, run: Run) -> str | None:
        """Why bytes are not there any more; None where they are."""
        if run.generation != self._generation:
            return "its memory was released and used again"
        known = 0 <= run.slot < self._used
        words = self._words(Header.place_of(run.slot), 3) if known else (0, 0, 0)
        if not known or words[RELEASED_IN] == self._generation:
            return "it was released"
        if words[SIZE] != run.size_bytes or not 0 <= run.offset <= self._size - HEADER_BYTES - run.size_bytes:
            return f"{run.size_bytes} bytes at {run.offset} of its memory are not what was put"
        return None

    def read(self, target: Bytes, offset: int) -> None:
        """Fill a buffer with bytes from some place on; no page of the arena is mapped."""
        done = 0
        while done < target.nbytes:
            got = os.preadv(self._fd, [target[done:].data], HEADER_BYTES + offset + done)
            if not got:
                raise OSError(f"{self.path} ends at {offset + done}, before {offset + target.nbytes}")
            done += got

    def view(self, run: Run) -> Bytes:
        """Bytes in place, read-only; the lease goes with the last of them."""
        mapped = _MAPS.find(self.path, self._generation)
        if mapped is None:
            mapped = _MAPS.share(self.path, self._generation, ReadOnlyMap(self._fd, 0, prot=mmap.PROT_READ))
        return np.frombuffer(mapped, np.uint8, run.size_bytes, HEADER_BYTES + run.offset)

    def close(self) -> None:
        """End this lease."""
        os.close(self._fd)

    def _words(self, start: int, count: int) -> tuple[int, ...]:
        found: list[int] = np.frombuffer(os.pread(self._fd, count * _WORD, start * _WORD), np.int64).tolist()
        return tuple(found)


class _SharedViews:
    """The mapping of each arena and generation that is in use in this process; it goes with the last view."""

    def __init__(self) -> None:
        self._maps: weakref.WeakValueDictionary[tuple[str, int], ReadOnlyMap] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """The child's copies of the mappings are its own; the lock is not."""
        self._lock = threading.Lock()

    def find(self, path: Path, generation: int) -> ReadOnlyMap | None:
        return self._maps.get((str(path), generation))

    def share(self, path: Path, generation: int, mapped: ReadOnlyMap) -> ReadOnlyMap:
        with self._lock:
            return self._maps.setdefault((str(path), generation), mapped)


_MAPS = _SharedViews()


def _share(fd: int, path: Path, timeout_s: float | None) -> None:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not try_lock(fd, fcntl.LOCK_SH):
        if deadline is not None and time.monotonic() > deadline:
            raise TransportTimeoutError(f"{path} was not let go of within {timeout_s} s")
        time.sleep(0.001)
