"""Tensors in shared memory of one machine, read in place through private mappings."""

import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport._bytes import tensor_bytes, tensor_over
from raycrew.tensor_transport._shards import (
    ShardRead,
    StoreStats,
    TensorShardInfo,
    dtype_name,
    new_shard_id,
    stale,
)
from raycrew.tensor_transport.backends._arena_files import (
    HEADER_BYTES,
    NO_STEP,
    PREFIX,
    RELEASED,
    SIZE,
    STEP,
    Arena,
    Header,
    LockFile,
    Words,
    is_dead,
    is_leased,
    machine_name,
    map_for_reading,
    shared_header,
    sweep,
)
from raycrew.tensor_transport.errors import (
    ShardLostError,
    TransportClosedError,
    TransportError,
)
from raycrew.tensor_transport.protocols import Bytes

MAP_BYTES = 1 << 20


class SharedMemoryBackend:
    """Shards in arenas of shared memory, reused once every shard in them is released and nobody reads them.

    Reading maps an arena privately: no copy, and a write stays with its reader, for whom the memory lives as
    long as the tensor. A backend that is pickled joins the same session in the other process. Shards outlive
    the process that put them until they are released, or until no process of the session is left; what a
    killed session leaves behind is removed when the next backend starts.

    Args:
        session: Name of the session to join; a new one unless given.
        arena_bytes: Size of an arena; a larger tensor has one of its own.
        max_bytes: Refuse to take more memory than this for the arenas of one process; None for no limit.
        directory: A file system in memory.
    """

    scheme = "shared_memory"
    gives_own_memory = True

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
        if session is not None and (not session.isalnum()):
            raise ValueError(f"session must be letters and digits, got {session!r}")
        self._directory = Path(directory)
        sweep(self._directory)
        self._session = session or uuid.uuid4().hex[:12]
        self._arena_bytes, self._max_bytes = arena_bytes, max_bytes
        self._epoch = uuid.uuid4().hex[:12]
        self._node = machine_name(self._directory)
        self._joined = LockFile(self._path(f"{self._session}.session"), shared=True)
        self._owner = LockFile(self._path(f"{self._session}-{self._epoch}.owner"), shared=False)
        self._arenas: list[Arena] = []
        self._current: Arena | None = None
        self._peak = self._put = self._released = 0
        self._lock = threading.Lock()
        self._closed = False

    @property
    def session(self) -> str:
        """Name of the session."""
        return self._session

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

    def fetch(self, reads: Sequence[ShardRead], *, timeout_s: float | None = None) -> list[torch.Tensor]:
        """The wanted parts: in place for a megabyte and more, else copies.

        Raises:
            StaleHandleError: A shard was released, or its session is over.
            ShardLostError: A shard is on another machine.
            TransportTimeoutError: An owner held an arena for longer than `timeout_s`.
        """
        self._check_open()
        by_arena: dict[str, list[int]] = defaultdict(list)
        for i, read in enumerate(reads):
            self._check_here(read.shard)
            by_arena[read.shard.locator[0]].append(i)
        found: dict[int, torch.Tensor] = {}
        for name, members in by_arena.items():
            places = [Place(*reads[i].shard.locator[1:]) for i in members]
            parts = read_arena(self._path(name), [reads[i] for i in members], places, timeout_s)
            found.update(zip(members, parts, strict=True))
        return [found[i] for i in range(len(reads))]

    def release(self, shards: Sequence[TensorShardInfo]) -> None:
        """Give shards up, whichever process of this machine put them.

        Raises:
            ShardLostError: A shard is on another machine.
        """
        for shard in shards:
            self._check_here(shard)
        self._mark_released(shards)

    def expire(self, before_step: int) -> int:
        """Release what any process of the session put with an earlier step."""
        return self._release_where(lambda slots: (slots[:, STEP] != NO_STEP) & (slots[:, STEP] < before_step))

    @property
    def node_ids(self) -> list[str]:
        """This machine, as its shards name it."""
        return [self._node]

    def clear_node(self, node_id: str) -> int:
        """Release everything that the session holds on this machine; how many shards that were."""
        if node_id != self._node:
            raise TransportError(f"this is machine {self._node}, not {node_id}")
        return self._release_where(lambda slots: slots[:, RELEASED] == 0)

    def stats(self) -> StoreStats:
        """What the whole session holds on this machine; counts of puts and releases are this process's."""
        shards = held = reserved = leases = 0
        oldest: list[int] = []
        for path in self._arena_paths():
            with shared_header(path) as header:
                if header is None:
                    continue
                live = header.live
                shards += len(live)
                held += int(live[:, SIZE].sum())
                oldest += live[live[:, STEP] != NO_STEP, STEP].tolist()
                reserved += path.stat().st_size - HEADER_BYTES
                del live
            leases += is_leased(path)
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
        self._owner.close()
        self._owner.path.unlink(missing_ok=True)
        self._joined.close()
        sweep(self._directory)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._session, self._arena_bytes, self._max_bytes, str(self._directory))

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
        path = self._path(f"{self._session}-{self._epoch}-{uuid.uuid4().hex[:8]}")
        arena = Arena(path, capacity)
        self._arenas.append(arena)
        return arena

    def _release_where(self, chosen: Callable[[Words], npt.NDArray[np.bool_]]) -> int:
        """Release the slots that are chosen, in all arenas; how many live ones that were."""
        count = 0
        for path in self._arena_paths():
            with shared_header(path) as header:
                if header is None:
                    continue
                old = (header.slots[:, RELEASED] == 0) & chosen(header.slots)
                header.slots[old, RELEASED] = 1
                count += int(old.sum())
            self._unlink_if_orphaned(path)
        self._released += count
        return count

    def _mark_released(self, shards: Sequence[TensorShardInfo]) -> None:
        by_arena: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for shard in shards:
            name, generation, _, slot = shard.locator
            by_arena[name].append((generation, slot))
        for name, members in by_arena.items():
            with shared_header(self._path(name)) as header:
                if header is None:
                    continue
                for generation, slot in members:
                    if generation == header.generation and not header.slots[slot, RELEASED]:
                        header.slots[slot, RELEASED] = 1
                        self._released += 1
            self._unlink_if_orphaned(self._path(name))

    def _unlink_if_orphaned(self, path: Path) -> None:
        """Remove an arena without live shards whose owner is dead."""
        epoch = path.name.split("-")[2]
        if epoch == self._epoch or not is_dead(self._path(f"{self._session}-{epoch}.owner")):
            return
        with shared_header(path) as header:
            empty = header is not None and not len(header.live)
        if empty:
            path.unlink(missing_ok=True)

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

    def _arena_paths(self) -> Iterator[Path]:
        yield from sorted(self._directory.glob(f"{PREFIX}{self._session}-*-*"))

    def _path(self, name: str) -> Path:
        return self._directory / f"{PREFIX}{name}"


def _rebuild(session: str, arena_bytes: int, max_bytes: int | None, directory: str) -> SharedMemoryBackend:
    return SharedMemoryBackend(session, arena_bytes=arena_bytes, max_bytes=max_bytes, directory=directory)


class Place(NamedTuple):
    """Where a shard lies in an arena."""

    generation: int
    offset: int
    slot: int


def read_arena(
    path: Path, reads: Sequence[ShardRead], places: Sequence[Place], timeout_s: float | None = None
) -> list[torch.Tensor]:
    """Parts of one arena: in place for a megabyte and more, else copies; each is its reader's own.

    Raises:
        StaleHandleError: A shard was released, or the arena is gone.
        TransportTimeoutError: Its owner held it for longer than `timeout_s`.
    """
    mapped = map_for_reading(path, timeout_s)
    in_place = sum(read.shard.size_bytes for read in reads) >= MAP_BYTES
    seen: set[str] = set()
    parts = []
    for read, place in zip(reads, places, strict=True):
        part = _part(mapped, read, place)
        parts.append(part if in_place and read.shard.shard_id not in seen else part.clone())
        seen.add(read.shard.shard_id)
    return parts


def _part(mapped: tuple[Header, Bytes] | None, read: ShardRead, place: Place) -> torch.Tensor:
    """The wanted part of a mapped arena, if the handle's bytes are still in it."""
    shard = read.shard
    if mapped is None:
        raise stale(shard, "its memory was given back")
    header, data = mapped
    if header.generation != place.generation:
        raise stale(shard, "its memory was released and used again")
    if header.slots[place.slot, RELEASED]:
        raise stale(shard, "it was released")
    raw = data[place.offset : place.offset + shard.size_bytes]
    return read.of(tensor_over(np.asarray(raw), shard.torch_dtype, shard.shape))
