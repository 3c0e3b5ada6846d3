"""Arenas read by those who only read: into buffers of their own, or in place."""

import contextlib
import errno
import os
import resource
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raycrew.tensor_transport._bytes.closing import Closing
from raycrew.tensor_transport._bytes.memory import copy_part
from raycrew.tensor_transport._bytes.shared.arena_files import RELEASED_IN, SIZE, Header
from raycrew.tensor_transport._bytes.shared.file_memory import hold_open, map_file
from raycrew.tensor_transport._bytes.shared.forks import remake_in_child
from raycrew.tensor_transport._bytes.shared.own_files import (
    HEADER_BYTES,
    NO_ROOM,
    close_locked,
    open_own,
    share,
)
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
    last lease on it. It takes no descriptor, and where there is no room for another one, all are forgotten.

    Args:
        most: So many are kept; beyond that, those that were used last.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._maps: dict[Path, tuple[os.stat_result, Bytes]] = {}
        self._lock = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """The child makes mappings of its own."""
        self._lock = threading.Lock()
        self._maps = {}

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._maps)

    def find(self, path: Path, file: os.stat_result) -> Bytes | None:
        """The mapping that is kept of the very file that is open, as long as it is."""
        with self._lock:
            found = self._maps.pop(path, None)
            if found is None or not os.path.samestat(found[0], file) or found[1].size != file.st_size:
                return None
            self._maps[path] = found
            return found[1]

    def make(self, path: Path, leased: int, file: os.stat_result) -> Bytes:
        """A new mapping of the file that is open as `leased`, kept if it can be, and not if it is removed.

        Raises:
            OSError: There is no room for it.
        """
        try:
            fd = open_own(path, os.O_RDONLY)  # A mapping of the leased one would be a lease for ever.
        except OSError as error:
            if error.errno not in (errno.ENOENT, *NO_ROOM):
                raise
            return self._map(leased, file.st_size)
        try:
            if not os.path.samestat(os.fstat(fd), file):
                return self._map(leased, file.st_size)
            made = self._map(fd, file.st_size)
        finally:
            os.close(fd)
        with self._lock:
            self._maps[path] = (file, made)
            while len(self._maps) > self._most:
                self._maps.pop(next(iter(self._maps)), None)  # Garbage may have been collected since.
        return made

    def end_lease(self, fd: int, path: Path, file: os.stat_result) -> None:
        """End a lease, and forget an arena that was removed under it."""
        if close_locked(fd, file):
            self._maps.pop(path, None)  # Without the lock: garbage may be collected while it is held.

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._maps.clear()

    def _map(self, fd: int, size_bytes: int) -> Bytes:
        try:
            return map_file(fd, size_bytes)
        except OSError:
            self.clear()
            return map_file(fd, size_bytes)


class Lease:
    """An arena in place, which its owner does not use anew for as long as this lives.

    Whoever closes the descriptor, as some programs do with all that they don't know, does not end it.
    """

    def __init__(self, mapped: Bytes, fd: int, path: Path, file: os.stat_result, maps: ArenaMaps) -> None:
        self.mapped, self.address = mapped, mapped.__array_interface__["data"][0]
        weakref.finalize(self, _end, hold_open(fd), maps, fd, path, file).atexit = False


def _end(let_go: Callable[[], object], maps: ArenaMaps, fd: int, path: Path, file: os.stat_result) -> None:
    let_go()
    maps.end_lease(fd, path, file)


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
            self._file = os.fstat(self._fd)
            self._generation, self._used = self._words(0, 2) if self._file.st_size > HEADER_BYTES else (0, 0)
            self._map = maps.find(path, self._file)
            self._lent: Lease | None = None
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
        room = self._file.st_size - HEADER_BYTES - run.size_bytes
        if words[SIZE] != run.size_bytes or not 0 <= run.offset <= room:
            return f"{run.size_bytes} bytes at {run.offset} of its memory are not what was put"
        return None

    def prepare(self, size_bytes: int) -> None:
        """Have the arena mapped if so many bytes are to be read: copies out of a mapping are faster."""
        if self._map is None and size_bytes >= _MAPPED_BYTES:
            with contextlib.suppress(OSError):  # There is no room for a mapping: it is read as a file is.
                self._map = self._maps.make(self.path, self._fd, self._file)

    def read(self, target: Bytes, offset: int) -> None:
        """Fill a buffer with bytes from some place on, by several threads at once."""
        self._check()
        if self._map is not None:
            start = HEADER_BYTES + offset
            copy_part(target, self._map[start : start + target.nbytes])
            return
        done = 0
        while done < target.nbytes:
            got = os.preadv(self._fd, [target[done:].data], HEADER_BYTES + offset + done)
            if not got:
                raise OSError(f"{self.path} ends at {offset + done}, before {offset + target.nbytes}")
            done += got

    def confirm(self) -> None:
        """Make sure, after the last read, that the lease was held all the time.

        Raises:
            OSError: It was not: somebody closes descriptors that are not his.
        """
        self._check()
        if self._words(0, 1) != (self._generation,):
            raise OSError(f"{self.path} was used anew while it was read: something closed its descriptor")

    def view(self, run: Run) -> Bytes:
        """Bytes in place, read-only; the lease goes with the last of them.

        Where there is no room for one more mapping, or few descriptors are left, they are a copy.
        """
        self._check()
        lease = _LEASES.find(self.path, self._generation)
        if lease is None:
            try:
                made = self._lease()
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                return self._copy(run)
            lease, self._lent = _LEASES.share(self.path, self._generation, made), made
        return np.asarray(_Leased(lease, run))

    def close(self) -> None:
        """End this lease."""
        self._map = None
        if self._lent is not None:  # The descriptor is its own.
            self._lent = None
            return
        self._maps.end_lease(self._fd, self.path, self._file)

    def _lease(self) -> Lease:
        if self._fd > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            raise OSError(errno.EMFILE, "half of the descriptors are taken: the others are not for leases")
        os.close(os.dup(self._fd))  # Nor is the last one, which the next reader needs.
        mapped = self._map if self._map is not None else self._maps.make(self.path, self._fd, self._file)
        return Lease(mapped, self._fd, self.path, self._file, self._maps)

    def _copy(self, run: Run) -> Bytes:
        copy = np.empty(run.size_bytes, np.uint8)
        self.read(copy, run.offset)
        copy.flags.writeable = False
        return copy

    def _check(self) -> None:
        """A file that was cut short is an error here, and not a SIGBUS while it is copied."""
        found = os.fstat(self._fd)
        if not os.path.samestat(found, self._file) or found.st_size < self._file.st_size:
            raise OSError(f"{self.path} was cut short, or its descriptor closed, while it was read")

    def _words(self, start: int, count: int) -> tuple[int, ...]:
        found: list[int] = np.frombuffer(os.pread(self._fd, count * _WORD, start * _WORD), np.int64).tolist()
        return tuple(found)


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
