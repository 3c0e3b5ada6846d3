"""Arenas read by those who only read: into buffers of their own, or in place."""

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raycrew.tensor_transport._bytes.closing import Closing
from raycrew.tensor_transport._bytes.memory import copy_part
from raycrew.tensor_transport._bytes.shared.arena_files import RELEASED_IN, SIZE, Header
from raycrew.tensor_transport._bytes.shared.forks import remake_in_child
from raycrew.tensor_transport._bytes.shared.own_files import HEADER_BYTES, close_locked, open_own, share
from raycrew.tensor_transport.protocols import Bytes

_WORD = 8
_MAPPED_BYTES = 1 << 20  # From here on a mapping is worth its making.


class Run(NamedTuple):
    """Bytes in one generation of an arena."""

    generation: int
    offset: int
    slot: int
    size_bytes: int


class ArenaMaps:
    """The mappings that one reader keeps from read to read: the kernel fills their pages in only once.

    A mapping says nothing about what lies in it: it is looked at under a lease only, by who saw the
    generation. It holds no memory that is given back: an arena is emptied when it is removed, or with the
    last lease on it.

    Args:
        most: So many are kept, each with a descriptor; beyond that, those that were used last.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._maps: dict[Path, tuple[int, mmap.mmap]] = {}
        self._lock = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """The child makes mappings of its own."""
        self._lock = threading.Lock()
        self._maps = {}

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._maps)

    def find(self, path: Path, leased: int) -> mmap.mmap | None:
        """The mapping that is kept of the very file that is open as `leased`."""
        inode = os.fstat(leased).st_ino
        with self._lock:
            found = self._maps.pop(path, None)
            if found is None or found[0] != inode:
                return None
            self._maps[path] = found
            return found[1]

    def make(self, path: Path, leased: int) -> mmap.mmap:
        """A new mapping of the file that is open as `leased`, kept unless the arena is removed by now."""
        inode = os.fstat(leased).st_ino
        try:
            fd = open_own(path, os.O_RDONLY)  # A mapping of the leased one would be a lease for ever.
        except FileNotFoundError:
            return mmap.mmap(leased, 0, prot=mmap.PROT_READ)
        try:
            if os.fstat(fd).st_ino != inode:
                return mmap.mmap(leased, 0, prot=mmap.PROT_READ)
            made = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        with self._lock:
            self._maps[path] = (inode, made)
            while len(self._maps) > self._most:
                self._maps.pop(next(iter(self._maps)), None)  # Garbage may have been collected since.
        return made

    def end_lease(self, fd: int, path: Path) -> None:
        """End a lease, and forget an arena that was removed under it."""
        if close_locked(fd):
            self._maps.pop(path, None)  # Without the lock: garbage may be collected while it is held.

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._maps.clear()


class ArenaReader(Closing):
    """An arena, open under a lease: its owner does not use it anew meanwhile.

    Args:
        path: Its file.
        maps: Where mappings are kept.
        heed: Called again and again while its owner holds it; ends the wait by what it raises.

    Raises:
        FileNotFoundError: It is gone.
    """

    def __init__(self, path: Path, maps: ArenaMaps, heed: Callable[[], object]) -> None:
        self.path = path
        self._maps = maps
        self._fd = open_own(path, os.O_RDWR)
        try:
            share(self._fd, heed)
            self._size = os.fstat(self._fd).st_size
            self._generation, self._used = self._words(0, 2) if self._size > HEADER_BYTES else (0, 0)
            self._map = maps.find(path, self._fd)
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

    def prepare(self, size_bytes: int) -> None:
        """Have the arena mapped if so many bytes are to be read: copies out of a mapping are faster."""
        if self._map is None and size_bytes >= _MAPPED_BYTES:
            self._map = self._maps.make(self.path, self._fd)

    def read(self, target: Bytes, offset: int) -> None:
        """Fill a buffer with bytes from some place on, by several threads at once."""
        if self._map is not None:
            copy_part(target, np.frombuffer(self._map, np.uint8, target.nbytes, HEADER_BYTES + offset))
            return
        done = 0
        while done < target.nbytes:
            got = os.preadv(self._fd, [target[done:].data], HEADER_BYTES + offset + done)
            if not got:
                raise OSError(f"{self.path} ends at {offset + done}, before {offset + target.nbytes}")
            done += got

    def view(self, run: Run) -> Bytes:
        """Bytes in place, read-only; the lease goes with the last of them."""
        lease = _LEASES.find(self.path, self._generation)
        if lease is None:
            mapped = self._map or self._maps.make(self.path, self._fd)
            made = Lease(mapped, os.dup(self._fd), self.path, self._maps)
            lease = _LEASES.share(self.path, self._generation, made)
        return np.asarray(_Leased(lease, run))

    def close(self) -> None:
        """End this lease."""
        self._map = None
        self._maps.end_lease(self._fd, self.path)

    def _words(self, start: int, count: int) -> tuple[int, ...]:
        found: list[int] = np.frombuffer(os.pread(self._fd, count * _WORD, start * _WORD), np.int64).tolist()
        return tuple(found)


class Lease:
    """An arena in place, which its owner does not use anew for as long as this lives."""

    def __init__(self, mapped: mmap.mmap, fd: int, path: Path, maps: ArenaMaps) -> None:
        whole = np.frombuffer(mapped, np.uint8)
        self.mapped, self.address = mapped, whole.__array_interface__["data"][0]
        weakref.finalize(self, maps.end_lease, fd, path).atexit = False


class _Leased:
    """Presents bytes of an arena to numpy, and keeps the lease."""

    def __init__(self, lease: Lease, run: Run) -> None:
        self._lease = lease
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (run.size_bytes,),
            "data": (lease.address + HEADER_BYTES + run.offset, True),
        }


class _Leases:
    """The lease of each arena and generation that is in use in this process; it goes with the last view."""

    def __init__(self) -> None:
        self._leases: weakref.WeakValueDictionary[tuple[Path, int], Lease] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """The child's copies of the mappings are its own; the lock is not."""
        self._lock = threading.Lock()

    def find(self, path: Path, generation: int) -> Lease | None:
        return self._leases.get((path, generation))

    def share(self, path: Path, generation: int, lease: Lease) -> Lease:
        with self._lock:
            return self._leases.setdefault((path, generation), lease)


_LEASES = _Leases()
