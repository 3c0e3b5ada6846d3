"""Arenas of shared memory: their layout, and their owner's side.

A reader holds a shared lock (`flock`, which the kernel drops when a process dies, however it dies) on an
arena for as long as its mapping lives. The owner reuses an arena only under the exclusive lock, and counts
its generation up: a handle names the generation that it was made in, and so does a release.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raycrew.tensor_transport._bytes.memory import copy_bytes
from raycrew.tensor_transport._bytes.shared.file_memory import map_file
from raycrew.tensor_transport._bytes.shared.own_files import (
    HEADER_BYTES,
    OwnFile,
    open_own,
    remove,
    try_lock,
)
from raycrew.tensor_transport.errors import TransportError
from raycrew.tensor_transport.protocols import Bytes

_TABLE = 16
MAX_SLOTS = (HEADER_BYTES // 8 - _TABLE) // 3
_GENERATION, _USED_SLOTS = 0, 1
SIZE, STEP, RELEASED_IN = 0, 1, 2
NO_STEP = -(2**62)

Words = npt.NDArray[np.int64]


class Header:
    """The first bytes of an arena: its generation, and size, step and state of every shard in it."""

    def __init__(self, words: Words) -> None:
        self._words = words

    @property
    def generation(self) -> int:
        """Counts up whenever the arena is used anew."""
        return int(self._words[_GENERATION])

    @property
    def slots(self) -> Words:
        """(size, step, generation in which it was released) of each shard so far."""
        used = int(self._words[_USED_SLOTS])
        return self._words[_TABLE : _TABLE + 3 * used].reshape(-1, 3)

    @property
    def live(self) -> Words:
        """The slots that are not released."""
        slots = self.slots
        live: Words = slots[slots[:, RELEASED_IN] != self.generation]
        return live

    def is_live(self, generation: int, slot: int) -> bool:
        """Whether a shard of a generation is there, and not released."""
        if generation != self.generation or not 0 <= slot < len(self.slots):
            return False
        return int(self.slots[slot, RELEASED_IN]) != generation

    def release(self, generation: int, slots: Any) -> int:
        """Note that shards of a generation are released; how many of them were live.

        What is noted is the generation: if the arena is used anew at this very moment, its new shards stay.
        """
        if generation != self.generation:
            return 0
        known = self.slots
        numbers = np.unique(np.asarray(slots, np.int64))
        numbers = numbers[(numbers >= 0) & (numbers < len(known))]
        numbers = numbers[known[numbers, RELEASED_IN] != generation]
        known[numbers, RELEASED_IN] = generation
        return len(numbers)

    @property
    def extent(self) -> tuple[int, int]:
        """The generation, and how many slots of it were used."""
        return self.generation, int(self._words[_USED_SLOTS])

    def release_since(self, extent: tuple[int, int] | None) -> None:
        """Release all slots that were added since; all there are, if not in this generation."""
        generation, used = self.extent
        begun = extent[1] if extent is not None and extent[0] == generation else 0
        self.release(generation, range(begun, used))

    @staticmethod
    def place_of(slot: int) -> int:
        """Where the words of a slot begin."""
        return _TABLE + 3 * slot

    def add(self, size_bytes: int, step: int | None) -> int:
        """Note a new shard; the number of its slot."""
        slot = int(self._words[_USED_SLOTS])
        start = self.place_of(slot)
        self._words[start : start + 3] = (size_bytes, NO_STEP if step is None else step, 0)
        self._words[_USED_SLOTS] = slot + 1
        return slot

    def begin_anywhere(self) -> None:
        """Count generations from a number that no other arena counts from."""
        self._words[_GENERATION] = secrets.randbits(62)

    def restart(self) -> None:
        """Begin the next generation, empty."""
        self._words[_USED_SLOTS] = 0
        self._words[_GENERATION] += 1


class Arena:
    """An arena that this process owns, mapped for as long as the owner lives.

    Without a path it is a file without a name, which readers open through this process, and which the kernel
    removes with the last process that has it open; nobody can cut it. One that somebody has cut, or closed,
    has nothing in it and takes nothing more.
    """

    def __init__(self, path: Path | None, capacity: int) -> None:
        self.capacity = capacity
        if path is None:
            fd = os.memfd_create("raycrew", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self.path = path or Path(f"/proc/{os.getpid()}/fd/{fd}")
        self.is_named = path is not None
        self._file = OwnFile(fd)
        self._size_bytes = HEADER_BYTES + capacity
        try:
            # All pages now: a full file system is an error here, and not a SIGBUS while copying.
            os.posix_fallocate(fd, 0, self._size_bytes)
            if path is None:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            mapped = map_file(fd, self._size_bytes, "write")
        except OSError as error:
            os.close(fd)
            if self.is_named:
                self.path.unlink(missing_ok=True)
            raise TransportError(
                f"no room for an arena of {capacity} bytes in {self.path.parent}: {error}"
            ) from error
        self._mapped = weakref.ref(mapped)
        self._header = Header(mapped[:HEADER_BYTES].view(np.int64))
        self.data: Bytes = mapped[HEADER_BYTES:]
        del mapped
        if path is None:
            self.header.begin_anywhere()
        self.header.restart()
        self._used = 0

    @property
    def is_whole(self) -> bool:
        """Whether its file is what it was: to look at memory that was cut is a SIGBUS."""
        return self._file.size_bytes() == self._size_bytes

    @property
    def header(self) -> Header:
        """What is in it."""
        return self._header if self.is_whole else Header(np.zeros(_TABLE, np.int64))

    def append(self, raw: Bytes, step: int | None) -> tuple[int, int] | None:
        """Copy bytes in; their (offset, slot), or None where they do not fit."""
        if not self._fits(raw.size):
            return None
        copy_bytes(self.data[self._used : self._used + raw.size], raw)
        return self._note(raw.size, step)

    def reserve(self, size_bytes: int) -> tuple[int, int] | None:
        """The (offset, slot) of bytes that the owner is going to write; None where they do not fit."""
        return self._note(size_bytes, None) if self._fits(size_bytes) else None

    def _fits(self, size_bytes: int) -> bool:
        header, room = self.header, self._used + size_bytes <= self.capacity
        return room and header is self._header and len(header.slots) < MAX_SLOTS

    def _note(self, size_bytes: int, step: int | None) -> tuple[int, int]:
        offset = self._used
        self._used += -(-size_bytes // 64) * 64
        return offset, self.header.add(size_bytes, step)

    def recycle(self) -> bool:
        """Begin anew if every shard is released and nobody reads; whether that was so."""
        if not self.is_whole or len(self.header.live) or not try_lock(self._file.fd, fcntl.LOCK_EX):
            return False
        try:
            self.header.restart()
            self._used = 0
        finally:
            fcntl.flock(self._file.fd, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Unmap; the file goes if nothing in it is wanted any more, as far as that can be told."""
        wanted = not self.is_whole or bool(len(self.header.live))
        is_unmapped = self.let_go()
        if not self.is_named or wanted:
            return
        if is_unmapped:
            remove(self.path)
        else:  # Somebody still writes to it.
            self.path.unlink(missing_ok=True)

    def let_go(self) -> bool:
        """Unmap, and leave the file to others: what a forked child does with its parent's.

        Returns:
            Whether nobody in this process holds any of its bytes.
        """
        self._header = Header(np.empty(0, np.int64))
        self.data = np.empty(0, np.uint8)
        self._file.close()
        return self._mapped() is None


@contextlib.contextmanager
def shared_header(path: Path) -> Iterator[Header | None]:
    """An arena's header, to be changed in place; None where the file is gone."""
    try:
        fd = open_own(path, os.O_RDWR)
    except FileNotFoundError:
        yield None
        return
    try:
        if os.fstat(fd).st_size < HEADER_BYTES:  # Its owner is just about to make it.
            yield None
            return
        mapped = mmap.mmap(fd, HEADER_BYTES)
        header = Header(np.frombuffer(mapped, np.int64))
        yield header  # What an error's frames have of it keeps the mapping as long as they are there.
        del header._words  # noqa: SLF001 - lets go of the mapping before it is closed
        mapped.close()
    finally:
        os.close(fd)
