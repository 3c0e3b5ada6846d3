"""Tensors in shared memory of one machine, read in place through private mappings."""

import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport._bytes import tensor_bytes
from raycrew.tensor_transport._forks import remake_in_child
from raycrew.tensor_transport._shards import (
    ShardRead,
    StoreStats,
    TensorShardInfo,
    dtype_name,
    new_shard_id,
    stale,
)
from raycrew.tensor_transport.backends._memory.arena_files import (
    HEADER_BYTES,
    NO_STEP,
    SIZE,
    STEP,
    Arena,
    Words,
    shared_header,
)
from raycrew.tensor_transport.backends._memory.mappings import Place, read_arena
from raycrew.tensor_transport.backends._memory.own_files import (
    PREFIX,
    LockFile,
    arenas_of,
    is_arena,
    is_free,
    machine_name,
    named_errors,
    own_folder,
    sweep,
)
from raycrew.tensor_transport.errors import (
    ShardLostError,
    TransportClosedError,
    TransportError,
)

_FILES = named_errors("shared memory")


class SharedMemoryBackend:
    """Shards in arenas of shared memory, reused once every shard in them is released and nobody reads them.

    Reading maps an arena privately, once per process: no copy, and a write stays with its reader, for whom
    the memory lives as long as the tensor. What is less than a megabyte, or than an eighth of its arena, is
    copied, so that tensors that are kept hold on to at most eight times their memory; so is what another
    result has in place already. Keep a `clone()` of a small part of a large read.

    A backend that is pickled joins the same session in the other process, and so does a forked child: it puts
    into arenas of its own. Shards outlive the process that put them until they are released, or until no
    process of the session is left; what a killed session leaves behind is removed when the next backend
    starts. All files lie in a folder of the user, which nobody else may enter; a planted one is refused.

    Args:
        session: Name of the session to join; a new one unless given.
        arena_bytes: Size of an arena; a larger tensor has one of its own.
        max_bytes: Refuse to take more memory than this for the arenas of one process; None for no limit.
        directory: A file system in memory.
    """

    scheme = "shared_memory"
    gives_own_memory = True

    @_FILES
    def __init__(
        self,
        session: str | None = None,
        *,
        arena_bytes: int = 64 << 20,
        max_bytes: int | None = None,
        directory: str | Path = "/dev/shm",
    ) -> None:
        if arena_bytes < 4096:
            raise ValueError(f"arena_bytes must be at least 4096, got {arena_bytes}")
        if session is not None and not (session.isalnum() and session.isascii()):
            raise ValueError(f"session must be letters and digits, got {session!r}")
        self._above = Path(directory)
        self._directory = own_folder(self._above)
        sweep(self._directory)
        self._session = session or uuid.uuid4().hex[:12]
        self._arena_bytes, self._max_bytes = arena_bytes, max_bytes
        self._epoch = uuid.uuid4().hex[:12]
        self._node = machine_name(self._directory)
        self._joined = LockFile(self._path(f"{self._session}.session"), shared=True)
        self._owner: LockFile | None = None
        self._arenas: list[Arena] = []
        self._current: Arena | None = None
        self._peak = self._put = self._released = 0
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
        self._epoch = uuid.uuid4().hex[:12]
        self._peak = self._put = self._released = 0
        self._lock = threading.Lock()

    @property
    def session(self) -> str:
        """Name of the session."""
        return self._session

    @_FILES
    def put(self, tensors: Sequence[torch.Tensor], *, step: int | None = None) -> list[TensorShardInfo]:
        """Copy tensors into arenas that are warm where possible.

        Raises:
            TransportError: There is no room, or `max_bytes` is reached.
            TransportClosedError: The backend is closed.
        """
        shards: list[TensorShardInfo] = []
        with self._lock:
            self._check_open()
            try:
                shards.extend(self._put_one(tensor, step) for tensor in tensors)
            except BaseException:
                self._mark_released(shards)
                raise
            self._put += len(shards)
            self._peak = max(self._peak, sum(int(arena.header.live[:, SIZE].sum()) for arena in self._arenas))
        return shards

    @_FILES
    def fetch(self, reads: Sequence[ShardRead], *, timeout_s: float | None = None) -> list[torch.Tensor]:
        """The wanted parts: in place for a megabyte and more, else copies.

        Raises:
            StaleHandleError: A shard was released, or its session is over.
            ShardLostError: A shard is on another machine.
            TransportTimeoutError: An owner held an arena for longer than `timeout_s`.
            TransportError: There are no descriptors, or no memory, to map an arena.
        """
        self._check_open()
        by_arena: dict[Path, list[int]] = defaultdict(list)
        for i, read in enumerate(reads):
            self._check_here(read.shard)
            by_arena[self._path_of(read.shard)].append(i)
        found: dict[int, torch.Tensor] = {}
        for path, members in by_arena.items():
            places = [Place(*reads[i].shard.locator[1:]) for i in members]
            parts = read_arena(path, [reads[i] for i in members], places, timeout_s)
            found.update(zip(members, parts, strict=True))
        return [found[i] for i in range(len(reads))]

    @_FILES
    def release(self, shards: Sequence[TensorShardInfo]) -> None:
        """Give shards up, whichever process of this machine put them.

        Raises:
            ShardLostError: A shard is on another machine.
        """
        for shard in shards:
            self._check_here(shard)
        self._mark_released(shards)

    @_FILES
    def expire(self, before_step: int) -> int:
        """Release what any process of the session put with an earlier step."""
        return self._release_where(lambda slots: (slots[:, STEP] != NO_STEP) & (slots[:, STEP] < before_step))

    @property
    def node_ids(self) -> list[str]:
        """This machine, as its shards name it."""
        return [self._node]

    @_FILES
    def clear_node(self, node_id: str) -> int:
        """Release everything that the session holds on this machine; how many shards that were."""
        if node_id != self._node:
            raise TransportError(f"this is machine {self._node}, not {node_id}")
        return self._release_where(lambda slots: np.ones(len(slots), bool))

    @_FILES
    def stats(self) -> StoreStats:
        """What the whole session holds on this machine; counts of puts and releases are this process's."""
        shards = held = reserved = leases = 0
        oldest: list[int] = []
        for path in arenas_of(self._directory, self._session):
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

    @_FILES
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
        sweep(self._directory)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._session, self._arena_bytes, self._max_bytes, str(self._above))

    def _put_one(self, tensor: torch.Tensor, step: int | None) -> TensorShardInfo:
        raw = tensor_bytes(tensor)
        place = self._current.append(raw, step) if self._current is not None else None
        if place is None:
            self._current = self._next_arena(raw.size)
            place = self._current.append(raw, step)
        if place is None or self._current is None:
            raise TransportError(f"a shard of {raw.size} bytes does not fit an arena made for it")
        offset, slot = place
        locator = (
            self._current.path.name.removeprefix(PREFIX),
            self._current.header.generation,
            offset,
            slot,
        )
        return TensorShardInfo(
            self.scheme,
            new_shard_id(),
            self._epoch,
            self._node,
            dtype_name(tensor.dtype),
            tuple(tensor.shape),
            locator,
        )

    def _next_arena(self, size_bytes: int) -> Arena:
        """A free arena that is large enough, else a new one."""
        for arena in self._arenas:
            if arena.capacity >= size_bytes and arena.recycle():
                return arena
        capacity = max(self._arena_bytes, size_bytes)
        reserved = sum(arena.capacity for arena in self._arenas)
        if self._max_bytes is not None and reserved + capacity > self._max_bytes:
            raise TransportError(
                f"{reserved} bytes of shared memory are taken and {capacity} more are needed, "
                f"over max_bytes={self._max_bytes}: release shards, or expire() old steps"
            )
        if self._owner is None:
            self._owner = LockFile(self._path(f"{self._session}-{self._epoch}.owner"), shared=False)
        path = self._path(f"{self._session}-{self._epoch}-{uuid.uuid4().hex[:8]}")
        arena = Arena(path, capacity)
        self._arenas.append(arena)
        return arena

    def _release_where(self, chosen: Callable[[Words], npt.NDArray[np.bool_]]) -> int:
        """Release the slots that are chosen, in all arenas; how many live ones that were."""
        count = 0
        for path in arenas_of(self._directory, self._session):
            with shared_header(path) as header:
                if header is None:
                    continue
                generation = header.generation
                count += header.release(generation, np.flatnonzero(chosen(header.slots)))
            self._unlink_if_orphaned(path)
        self._released += count
        return count

    def _mark_released(self, shards: Sequence[TensorShardInfo]) -> None:
        by_arena: dict[tuple[Path, int], list[int]] = defaultdict(list)
        for shard in shards:
            _, generation, _, slot = shard.locator
            by_arena[self._path_of(shard), generation].append(slot)
        for (path, generation), slots in by_arena.items():
            with shared_header(path) as header:
                if header is not None:
                    self._released += header.release(generation, slots)
            self._unlink_if_orphaned(path)

    def _unlink_if_orphaned(self, path: Path) -> None:
        """Remove an arena without live shards whose owner is dead."""
        session, epoch, _ = path.name.removeprefix(PREFIX).split("-")
        if epoch == self._epoch or not is_free(self._path(f"{session}-{epoch}.owner")):
            return
        with shared_header(path) as header:
            empty = header is not None and not len(header.live)
        if empty:
            path.unlink(missing_ok=True)

    def _path_of(self, shard: TensorShardInfo) -> Path:
        """The arena of a shard, whose name came with a handle."""
        name = shard.locator[0]
        if not is_arena(name):
            raise stale(shard, f"{name!r} is no name of an arena")
        return self._path(name)

    def _check_here(self, shard: TensorShardInfo) -> None:
        if shard.node_id != self._node:
            raise ShardLostError(
                f"shard {shard.shard_id} is in the shared memory of another machine ({shard.node_id}, "
                f"this is {self._node}): use a backend that reaches it",
                **shard.identity,
            )

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosedError("this SharedMemoryBackend is closed")

    def _path(self, name: str) -> Path:
        return self._directory / f"{PREFIX}{name}"


def _rebuild(session: str, arena_bytes: int, max_bytes: int | None, directory: str) -> SharedMemoryBackend:
    return SharedMemoryBackend(session, arena_bytes=arena_bytes, max_bytes=max_bytes, directory=directory)
