"""Arenas of shared memory as files: layout, leases by file locks, sessions that end with their processes.

All of it rests on `flock`, which the kernel drops when a process dies, however it dies:

- A reader holds a shared lock on an arena for as long as its mapping lives. The owner reuses an arena only
  under the exclusive lock, and counts its generation up: a handle names the generation that it was made in.
- An owner holds an exclusive lock on a file of its epoch; who gets it knows that the owner is dead.
- Every process of a session holds a shared lock on the session's file. Who gets the exclusive one knows that
  the session is over, and removes its files.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raycrew.tensor_transport._bytes import copy_bytes
from raycrew.tensor_transport.errors import TransportError, TransportTimeoutError
from raycrew.tensor_transport.protocols import Bytes

PREFIX = "raycrew-"
HEADER_BYTES = 512 * 1024
_TABLE = 16
MAX_SLOTS = (HEADER_BYTES // 8 - _TABLE) // 3
_GENERATION, _USED_SLOTS = 0, 1
SIZE, STEP, RELEASED = 0, 1, 2
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
        """(size, step, released) of each shard so far."""
        used = int(self._words[_USED_SLOTS])
        return self._words[_TABLE : _TABLE + 3 * used].reshape(-1, 3)

    @property
    def live(self) -> Words:
        """The slots that are not released."""
        slots = self.slots
        live: Words = slots[slots[:, RELEASED] == 0]
        return live

    def add(self, size_bytes: int, step: int | None) -> int:
        """Note a new shard; the number of its slot."""
        slot = int(self._words[_USED_SLOTS])
        start = _TABLE + 3 * slot
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
    removes with the last process that has it open.
    """

    def __init__(self, path: Path | None, capacity: int) -> None:
        self.capacity = capacity
        if path is None:
            self._fd = os.memfd_create("raycrew", os.MFD_CLOEXEC)
        else:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.path = path or Path(f"/proc/{os.getpid()}/fd/{self._fd}")
        self.is_named = path is not None
        try:
            # All pages now: a full file system is an error here, and not a SIGBUS while copying.
            os.posix_fallocate(self._fd, 0, HEADER_BYTES + capacity)
            self._map = mmap.mmap(self._fd, HEADER_BYTES + capacity)
        except OSError as error:
            self._give_back()
            raise TransportError(
                f"no room for an arena of {capacity} bytes in {self.path.parent}: {error}"
            ) from error
        self.header = Header(np.frombuffer(self._map, np.int64, HEADER_BYTES // 8))
        self.data: Bytes = np.frombuffer(self._map, np.uint8, capacity, HEADER_BYTES)
        if path is None:
            self.header.begin_anywhere()
        self.header.restart()
        self._used = 0

    def append(self, raw: Bytes, step: int | None) -> tuple[int, int] | None:
        """Copy bytes in; their (offset, slot), or None where they do not fit."""
        if self._used + raw.size > self.capacity or len(self.header.slots) >= MAX_SLOTS:
            return None
        offset = self._used
        copy_bytes(self.data[offset : offset + raw.size], raw)
        self._used += -(-raw.size // 64) * 64
        return offset, self.header.add(raw.size, step)

    def recycle(self) -> bool:
        """Begin anew if every shard is released and nobody reads; whether that was so."""
        if len(self.header.live) or not _try_lock(self._fd, fcntl.LOCK_EX):
            return False
        try:
            self.header.restart()
            self._used = 0
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Unmap; the file goes if nothing in it is wanted any more."""
        wanted = bool(len(self.header.live))
        self.header = Header(np.empty(0, np.int64))
        self.data = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()
        self._give_back(unlink=not wanted)

    def _give_back(self, *, unlink: bool = True) -> None:
        if self.is_named and unlink:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)


def map_for_reading(path: Path, timeout_s: float | None = None) -> tuple[Header, Bytes] | None:
    """Map an arena privately under a lease that lives as long as the bytes; None where the file is gone.

    Writes to the bytes stay in this mapping. The mapping's own descriptor keeps the shared lock.

    Raises:
        TransportTimeoutError: An owner that is just about to use the arena anew did not let go of it.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_size <= HEADER_BYTES:
            return None
        if not _share_in_time(fd, timeout_s):
            raise TransportTimeoutError(f"{path} was not let go of within {timeout_s} s")
        mapped = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    return Header(np.frombuffer(mapped, np.int64, HEADER_BYTES // 8)), np.frombuffer(
        mapped, np.uint8, offset=HEADER_BYTES
    )


@contextlib.contextmanager
def shared_header(path: Path) -> Iterator[Header | None]:
    """An arena's header, to be changed in place; None where the file is gone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        with mmap.mmap(fd, HEADER_BYTES) as mapped:
            header = Header(np.frombuffer(mapped, np.int64))
            yield header
            del header._words  # noqa: SLF001 - lets go of the mapping before it is closed
    finally:
        os.close(fd)


def is_leased(path: Path) -> bool:
    """Whether somebody reads an arena."""
    return not _is_free(path)


class LockFile:
    """A file that is locked for as long as this object is open."""

    def __init__(self, path: Path, *, shared: bool) -> None:
        self.path = path
        self._fd: int | None = _open_locked(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)

    def close(self) -> None:
        """Give the lock up; idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def is_dead(path: Path) -> bool:
    """Whether the process that locked a file (or all of them) is gone."""
    return _is_free(path)


def sweep(directory: Path) -> list[str]:
    """Remove the files of sessions that are over; their names."""
    ended = []
    for path in directory.glob(f"{PREFIX}*.session"):
        name = path.name.removeprefix(PREFIX).removesuffix(".session")
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _try_lock(fd, fcntl.LOCK_EX):
                    for file in directory.glob(f"{PREFIX}{name}-*"):
                        file.unlink(missing_ok=True)
                    path.unlink(missing_ok=True)
                    ended.append(name)
            finally:
                os.close(fd)
    return ended


def _open_locked(path: Path, kind: int) -> int:
    """Open and lock a file that is still the one of that name afterwards (a sweep may have removed it)."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, kind)
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
        os.close(fd)


def _is_free(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return _try_lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _share_in_time(fd: int, timeout_s: float | None) -> bool:
    if timeout_s is None:
        fcntl.flock(fd, fcntl.LOCK_SH)
        return True
    deadline = time.monotonic() + timeout_s
    while not _try_lock(fd, fcntl.LOCK_SH):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def machine_name(directory: Path) -> str:
    """What two processes have in common that see the same shared memory: the boot, and the file system."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host: Any = boot.read_text().strip()[:13] if boot.exists() else os.uname().nodename
    return f"{host}-{directory.stat().st_dev}"
