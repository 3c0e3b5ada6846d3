"""Arenas as their readers see them: mapped privately, once per process for what is in them by then."""

import bisect
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from raycrew.tensor_transport._bytes.gone import stale
from raycrew.tensor_transport._bytes.memory import private_copy, tensor_over
from raycrew.tensor_transport._bytes.shared.arena_files import Header
from raycrew.tensor_transport._bytes.shared.file_memory import map_file
from raycrew.tensor_transport._bytes.shared.forks import remake_in_child
from raycrew.tensor_transport._bytes.shared.own_files import (
    HEADER_BYTES,
    NO_ROOM,
    in_time,
    is_descriptor,
    open_own,
    share,
)
from raycrew.tensor_transport._rows import ShardRead
from raycrew.tensor_transport.errors import TransportError
from raycrew.tensor_transport.protocols import Bytes

MAP_BYTES = 1 << 20
MAP_SHARE = 8


class Place(NamedTuple):
    """Where a shard lies in an arena."""

    generation: int
    offset: int
    slot: int


class PrivateMap:
    """An arena mapped privately, under a lease that lives as long as the mapping.

    Writes to it stay in it, so each run of its bytes is given to one reader only. A page that was written to
    is a copy from then on: what is put into the rest of it afterwards does not show, so only shards are read
    that were there when the mapping was made.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._raw = map_file(fd, size_bytes, "private")
        self._given: list[tuple[int, int]] = []
        self.__array_interface__ = self._raw.__array_interface__
        self._known = len(self.header.slots)

    @property
    def raw(self) -> Bytes:
        """All bytes of the file in place, which keep this object."""
        return np.asarray(self)

    @property
    def header(self) -> Header:
        """The arena's header, as its owner has it now."""
        return Header(self.raw[:HEADER_BYTES].view(np.int64))

    @property
    def capacity(self) -> int:
        """Bytes of the arena."""
        return self._raw.size - HEADER_BYTES

    def knows(self, places: Sequence[Place]) -> bool:
        """Whether shards were there when the mapping was made."""
        return all(place.slot < self._known for place in places)

    def is_whole(self, path: Path) -> bool:
        """Whether the file is still there, and nobody has cut it."""
        try:
            return path.stat().st_size == self._raw.size
        except OSError:
            return False

    def give(self, start: int, stop: int) -> bool:
        """Whether these bytes were given to nobody yet; they are now."""
        given = self._given
        i = bisect.bisect_left(given, (start, stop))
        if (i and given[i - 1][1] > start) or (i < len(given) and given[i][0] < stop):
            return False
        given.insert(i, (start, stop))
        return True


class SharedMaps:
    """The latest mapping of each arena and generation that results in this process lie in, while they do."""

    def __init__(self) -> None:
        self._maps: weakref.WeakValueDictionary[tuple[str, int], PrivateMap] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """The child's copies of the mappings are its own; the lock is not."""
        self._lock = threading.Lock()

    def find(self, path: Path, places: Sequence[Place]) -> PrivateMap | None:
        """A mapping of an arena that is still there, which shows these places as they were put."""
        found = self._maps.get((str(path), places[0].generation))
        return found if found is not None and found.knows(places) and found.is_whole(path) else None

    def share(self, path: Path, mapped: PrivateMap, places: Sequence[Place]) -> PrivateMap:
        """Have later reads use a mapping; the one to use, as another thread may have been faster."""
        key = str(path), mapped.header.generation
        with self._lock:
            found = self._maps.get(key)
            if found is None or not found.knows(places):
                found = self._maps[key] = mapped
            return found

    def give(self, mapped: PrivateMap, start: int, stop: int) -> bool:
        """`PrivateMap.give`, by one thread at a time."""
        with self._lock:
            return mapped.give(start, stop)


_MAPS = SharedMaps()


def read_arena(
    path: Path, reads: Sequence[ShardRead], places: Sequence[Place], timeout_s: float | None = None
) -> list[torch.Tensor]:
    """Parts of one arena, each its reader's own.

    They lie in place where they are, together, a megabyte and an eighth of the arena or more: what is kept
    never holds on to much more memory than itself. Else they are copies, and so are bytes that another
    result has already.

    Raises:
        StaleHandleError: A shard was released, or the arena is gone.
        TransportTimeoutError: Its owner held it for longer than `timeout_s`.
        TransportError: There are no descriptors, or no address space, for a mapping.
    """
    wanted = sum(read.size_bytes for read in reads if not isinstance(read.rows, np.ndarray))
    shared = _MAPS.find(path, places) if wanted >= MAP_BYTES else None
    fresh = None if shared is not None else map_for_reading(path, timeout_s)
    if fresh is not None and wanted >= max(MAP_BYTES, fresh.capacity // MAP_SHARE):
        shared, fresh = _MAPS.share(path, fresh, places), None
    parts = []
    for read, place in zip(reads, places, strict=True):
        part = None if shared is None else _in_place(shared, read, place)
        if part is None:
            fresh = fresh or map_for_reading(path, timeout_s)
            part = private_copy(_part(fresh, read, place))
        parts.append(part)
    return parts


def map_for_reading(path: Path, timeout_s: float | None = None) -> PrivateMap | None:
    """Map an arena under a lease; None where the file is gone.

    The mapping keeps the shared lock.

    Raises:
        TransportTimeoutError: An owner that is just about to use the arena anew did not let go of it.
        TransportError: There are no descriptors, or no address space, left; or it is another user's.
    """
    try:
        fd = open_own(path, os.O_RDWR)
    except TransportError:
        if is_descriptor(path):  # The number is another file's by now.
            return None
        raise
    except OSError as error:
        if error.errno in NO_ROOM:
            raise TransportError(f"{path} can't be read: {error}") from error
        return None
    try:
        if os.fstat(fd).st_size <= HEADER_BYTES:
            return None
        share(fd, in_time(path, timeout_s))
        return PrivateMap(fd, os.fstat(fd).st_size)
    except OSError as error:
        if isinstance(error, TransportError):
            raise
        raise TransportError(f"{path} can't be mapped: {error}") from error
    finally:
        os.close(fd)


def _in_place(mapped: PrivateMap, read: ShardRead, place: Place) -> torch.Tensor | None:
    """The wanted part where it lies, unless somebody has it already."""
    if isinstance(read.rows, np.ndarray):
        return None
    part = _part(mapped, read, place)
    start, size = place.offset, read.shard.size_bytes
    if part.is_contiguous():
        first = mapped.raw.__array_interface__["data"][0] + HEADER_BYTES
        start, size = part.data_ptr() - first, part.nbytes
    return part if not part.numel() or _MAPS.give(mapped, start, start + size) else None


def _part(mapped: PrivateMap | None, read: ShardRead, place: Place) -> torch.Tensor:
    """The wanted part of a mapped arena, if the handle's bytes are still in it."""
    shard = read.shard
    if mapped is None:
        raise stale(shard, "its memory was given back")
    header = mapped.header
    if header.generation != place.generation:
        raise stale(shard, "its memory was released and used again")
    if not header.is_live(place.generation, place.slot):
        raise stale(shard, "it was released")
    if place.offset < 0 or place.offset + shard.size_bytes > mapped.capacity:
        raise stale(shard, f"bytes {place.offset}.. of its memory are not there")
    raw = mapped.raw[HEADER_BYTES + place.offset :][: shard.size_bytes]
    return read.of(tensor_over(raw, shard.torch_dtype, shard.shape))
