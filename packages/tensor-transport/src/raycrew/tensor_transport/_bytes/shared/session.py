"""The arenas of one session of shared memory: put by any of its processes, until released or all are gone."""

import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raycrew.tensor_transport._bytes.shared.arena_files import (
    NO_STEP,
    SIZE,
    STEP,
    Arena,
    Words,
    shared_header,
)
from raycrew.tensor_transport._bytes.shared.forks import remake_in_child
from raycrew.tensor_transport._bytes.shared.own_files import (
    HEADER_BYTES,
    PREFIX,
    LockFile,
    arenas_of,
    is_free,
    machine_name,
    own_folder,
    remove,
    sweep,
)
from raycrew.tensor_transport._rows import StoreStats
from raycrew.tensor_transport.errors import TransportClosedError, TransportError
from raycrew.tensor_transport.protocols import Bytes


class Spot(NamedTuple):
    """Where bytes lie: the name of an arena, and place and number in one generation of it."""

    arena: str
    generation: int
    offset: int
    slot: int


class ArenaSession:
    """Runs of bytes in arenas that are reused once everything in them is released and nobody reads them.

    What is put outlives the process that put it, until no process of the session is left; what a killed
    session leaves behind is removed when the next one starts. A forked child stays in the session, and is an
    owner of its own.

    Args:
        who: What errors call the object that holds the session.
        session: Name of the session to join; a new one unless given.
        arena_bytes: Size of an arena; a larger run has one of its own.
        max_bytes: Refuse to take more memory than this for the arenas of this process; None for no limit.
        directory: A file system in memory.
    """

    def __init__(
        self, who: str, session: str | None, *, arena_bytes: int, max_bytes: int | None, directory: Path
    ) -> None:
        if arena_bytes < 4096:
            raise ValueError(f"arena_bytes must be at least 4096, got {arena_bytes}")
        if session is not None and not (session.isalnum() and session.isascii()):
            raise ValueError(f"session must be letters and digits, got {session!r}")
        self._who = who
        self.folder = own_folder(directory)
        sweep(self.folder)
        self.name = session or uuid.uuid4().hex[:12]
        self._arena_bytes, self._max_bytes = arena_bytes, max_bytes
        self.epoch = ""
        self.machine = machine_name(self.folder)
        self._joined = LockFile(self.path(f"{self.name}.session"), shared=True)
        self._owner: LockFile | None = None
        self._arenas: list[Arena] = []
        self._current: Arena | None = None
        self._peak = self._held_at_most = self._put = self._released = 0
        self._lock = threading.Lock()
        self._closed = False
        remake_in_child(self)

    def after_fork(self) -> None:
        """A child stays in the session, and is an owner of its own."""
        inherited, self._arenas, self._current = self._arenas, [], None
        for arena in inherited:
            arena.let_go()
        if self._owner is not None:
            self._owner.close()
            self._owner = None
        self.epoch = ""
        self._peak = self._held_at_most = self._put = self._released = 0
        self._lock = threading.Lock()

    def put(self, raws: Sequence[Bytes], step: int | None = None) -> list[Spot]:
        """Copy runs of bytes into arenas that are warm where possible, all or none.

        Raises:
            TransportError: There is no room, or `max_bytes` is reached.
            TransportClosedError: The session is closed.
        """
        spots: list[Spot] = []

        def take() -> None:
            for raw in raws:
                arena, place = self._place(raw.size, partial(Arena.append, raw=raw, step=step))
                spots.append(self._spot(arena, *place))
            self._count(len(spots), sum(raw.size for raw in raws))

        self._take(take, spots)
        return spots

    def reserve(self, size_bytes: int) -> tuple[Spot, Bytes]:
        """Room in an arena, and its bytes, to be written before anybody is told of it; `release` gives it up.

        Raises:
            TransportError: There is no room, or `max_bytes` is reached.
            TransportClosedError: The session is closed.
        """
        spots: list[Spot] = []
        rooms: list[Bytes] = []

        def take() -> None:
            arena, (offset, slot) = self._place(size_bytes, lambda arena: arena.reserve(size_bytes))
            spots.append(self._spot(arena, offset, slot))
            rooms.append(arena.data[offset : offset + size_bytes])
            self._count(1, size_bytes)

        self._take(take, spots)
        return spots[0], rooms[0]

    def _take(self, take: Callable[[], None], spots: Sequence[Spot]) -> None:
        """Take room in arenas, which notes where; where it is broken off, none of it is taken."""
        try:
            with self._lock:
                self.check_open()
                arena, begun = self._current, None if self._current is None else self._current.header.extent
                try:
                    take()
                except BaseException:  # what was taken last may not be noted
                    if (now := self._current) is not None:
                        now.header.release_since(begun if now is arena else None)
                    raise
        except BaseException:
            self.release(spots)
            raise

    def release(self, spots: Sequence[Spot]) -> None:
        """Give bytes up, whichever process put them."""
        by_arena: dict[tuple[str, int], list[int]] = defaultdict(list)
        for spot in spots:
            by_arena[spot.arena, spot.generation].append(spot.slot)
        for (name, generation), slots in by_arena.items():
            path = self.path(name)
            with shared_header(path) as header:
                if header is not None:
                    self._released += header.release(generation, slots)
            self._unlink_if_orphaned(path)

    def release_where(self, chosen: Callable[[Words], npt.NDArray[np.bool_]]) -> int:
        """Release the slots that are chosen, in all arenas of the session; how many live ones that were."""
        count = 0
        for path in arenas_of(self.folder, self.name):
            with shared_header(path) as header:
                if header is None:
                    continue
                generation = header.generation
                count += header.release(generation, np.flatnonzero(chosen(header.slots)))
            self._unlink_if_orphaned(path)
        self._released += count
        return count

    def stats(self) -> StoreStats:
        """What the whole session holds on this machine; counts of puts and releases are this process's."""
        shards = held = reserved = leases = 0
        oldest: list[int] = []
        for path in arenas_of(self.folder, self.name):
            with shared_header(path) as header:
                if header is None:
                    continue
                live = header.live
                shards += len(live)
                held += int(live[:, SIZE].sum())
                oldest += live[live[:, STEP] != NO_STEP, STEP].tolist()
                reserved += path.stat().st_size - HEADER_BYTES
                del live
            leases += not is_free(path)
        return StoreStats(
            shards=shards,
            held_bytes=held,
            peak_bytes=self._peak,
            reserved_bytes=reserved,
            put_shards=self._put,
            released_shards=self._released,
            oldest_step=min(oldest, default=None),
            leases=leases,
        )

    def close(self) -> None:
        """Leave the session; the last process to leave removes what is left of it. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for arena in self._arenas:
                arena.close()
            self._arenas, self._current = [], None
        if self._owner is not None:
            self._owner.path.unlink(missing_ok=True)
            self._owner.close()
        self._joined.close()
        sweep(self.folder)

    def path(self, name: str) -> Path:
        """The file of an arena, or of the session."""
        return self.folder / f"{PREFIX}{name}"

    def check_open(self) -> None:
        """Raise TransportClosedError after `close`."""
        if self._closed:
            raise TransportClosedError(f"this {self._who} is closed")

    def _count(self, put: int, size_bytes: int) -> None:
        """Note what was put; all arenas are looked at only where that may be the most there ever was."""
        self._put += put
        self._held_at_most += size_bytes
        if self._held_at_most > self._peak:
            self._held_at_most = sum(int(arena.header.live[:, SIZE].sum()) for arena in self._arenas)
            self._peak = max(self._peak, self._held_at_most)

    def _place(
        self, size_bytes: int, take: Callable[[Arena], tuple[int, int] | None]
    ) -> tuple[Arena, tuple[int, int]]:
        """What the current arena takes, or the next one."""
        if self._current is not None and (place := take(self._current)) is not None:
            return self._current, place
        self._current = arena = self._next_arena(size_bytes)
        if (place := take(arena)) is None:
            raise TransportError(f"{size_bytes} bytes do not fit an arena made for them")
        return arena, place

    @staticmethod
    def _spot(arena: Arena, offset: int, slot: int) -> Spot:
        return Spot(arena.path.name.removeprefix(PREFIX), arena.header.generation, offset, slot)

    def _next_arena(self, size_bytes: int) -> Arena:
        """A free arena that is large enough, else a new one; those used longest ago are looked at first."""
        for index, arena in enumerate(self._arenas):
            if arena.capacity >= size_bytes and arena.recycle():
                self._arenas[index:] = [*self._arenas[index + 1 :], arena]
                return arena
        capacity = max(self._arena_bytes, size_bytes)
        reserved = sum(arena.capacity for arena in self._arenas)
        if self._max_bytes is not None and reserved + capacity > self._max_bytes:
            raise TransportError(
                f"{reserved} bytes of shared memory are taken and {capacity} more are needed, "
                f"over max_bytes={self._max_bytes}: withdraw offers, release shards, or expire() old steps"
            )
        if self._owner is None:
            # A file of its own for each try: what an interrupt left locked would be waited for for ever.
            self.epoch = uuid.uuid4().hex[:12]
            self._owner = LockFile(self.path(f"{self.name}-{self.epoch}.owner"), shared=False)
        arena = Arena(self.path(f"{self.name}-{self.epoch}-{uuid.uuid4().hex[:8]}"), capacity)
        self._arenas.append(arena)
        return arena

    def _unlink_if_orphaned(self, path: Path) -> None:
        """Remove an arena without live slots whose owner is dead."""
        session, epoch, _ = path.name.removeprefix(PREFIX).split("-")
        if epoch == self.epoch or not is_free(self.path(f"{session}-{epoch}.owner")):
            return
        with shared_header(path) as header:
            empty = header is not None and not len(header.live)
        if empty:
            remove(path)
