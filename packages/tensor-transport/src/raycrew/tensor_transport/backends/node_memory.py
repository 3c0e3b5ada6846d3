"""Tensors in memory without a name of the process that puts them, mapped by readers on the same machine."""

import dataclasses
import functools
import os
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from raycrew.tensor_transport import _ray
from raycrew.tensor_transport._bytes import (
    SIZE,
    Arena,
    Place,
    is_free,
    lost,
    machine_name,
    memory_left,
    named_errors,
    read_arena,
    remake_in_child,
    stale,
    tensor_bytes,
    tensor_from,
)
from raycrew.tensor_transport._rows import (
    ShardRead,
    StoreStats,
    TensorShardInfo,
    dtype_name,
    new_shard_id,
)
from raycrew.tensor_transport.backends._machines import Machines
from raycrew.tensor_transport.backends.ray_refs import RayRefBackend
from raycrew.tensor_transport.errors import ShardLostError, StaleHandleError, TransportError
from raycrew.tensor_transport.protocols import Bytes

_ASKING_SHARE = 20  # Where Ray has to be asked, that takes at most a twentieth of the time.
_ARENA_PATH = re.compile(r"/proc/\d+/fd/\d+")
_FILES = named_errors("memory of this node")


class NodeMemoryBackend:
    """Handles on pooled memory of the process that puts, which readers on the machine map privately.

    One copy is made when tensors are put, none when they are read, and a write stays with its reader. Bytes
    go when the last handle goes, as Ray counts it, or with the process that put them; a reader's mapping
    stays. Memory that is free again is kept warm for the next tensors, for a minute. What is less than a
    megabyte, or than an eighth of its arena, is copied when it is read, so that tensors that are kept hold on
    to at most eight times their memory; so is what another result has in place already.

    A forked child reads; to put is refused there, as Ray can't be used in it.

    Readers on other machines get copies by way of a process on the owner's node. Where that would be the rule
    (a cluster of several machines), and where memory is short, tensors go to Ray's object store instead; a
    registry needs a `RayRefBackend`, too, to read those.

    Args:
        arena_bytes: Size of an arena; a larger tensor has one of its own.
        idle_s: Give memory back that has been free for so long.
    """

    scheme = "node_memory"
    gives_own_memory = True
    travels_with_handles = True

    def __init__(self, *, arena_bytes: int = 64 << 20, idle_s: float = 60.0) -> None:
        if arena_bytes < 4096:
            raise ValueError(f"arena_bytes must be at least 4096, got {arena_bytes}")
        self._arena_bytes, self._idle_s = arena_bytes, idle_s
        self._otherwise = RayRefBackend()
        self._arenas: list[Arena] = []
        self._used_at: dict[Path, float] = {}
        self._lent: dict[str, list[tuple[Arena, Place]]] = {}
        self._connection = ""
        self._gone: deque[str] = deque()
        self._asked_for: set[str] = set()
        self._machines = Machines()
        self._collected_at = self._ask_at = float("-inf")
        self._peak = self._put = self._released = 0
        self._lock = threading.RLock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """A child has lent nothing, and lets go of what its parent has."""
        inherited, self._arenas, self._used_at = self._arenas, [], {}
        for arena in inherited:
            arena.let_go()
        self._lent, self._gone, self._asked_for = {}, deque(), set()
        self._peak = self._put = self._released = 0
        self._lock = threading.RLock()

    @_FILES
    def put(self, tensors: Sequence[torch.Tensor], *, step: int | None = None) -> list[TensorShardInfo]:
        """Copy tensors into warm memory where possible."""
        raws = [tensor_bytes(tensor) for tensor in tensors]
        lends = bool(raws) and self._can_lend()
        with self._lock:
            self.collect()
            places = self._take(raws) if lends else None
            if places is None:
                return self._otherwise.put(tensors, step=step)
            token = _ray.put(b"")
            self._lent[token.hex()] = places
            self._connection = _ray.connection_id()
            if not _ray.when_unreferenced(token, self._gone.append):
                self._asked_for.add(token.hex())
            self._put += len(tensors)
            self._peak = max(self._peak, self._held_bytes())
        owner, node, machine = f"process {os.getpid()}", _ray.current_node_id(), _machine()
        return [
            TensorShardInfo(
                self.scheme,
                new_shard_id(),
                owner,
                node,
                dtype_name(tensor.dtype),
                tuple(tensor.shape),
                (token, machine, str(arena.path), place),
            )
            for tensor, (arena, place) in zip(tensors, places, strict=True)
        ]

    @_FILES
    def fetch(self, reads: Sequence[ShardRead], *, timeout_s: float | None = None) -> list[torch.Tensor]:
        """The wanted parts, to be written to at will: in place for a megabyte and more, else copies.

        Raises:
            ShardLostError: The process that put a shard is gone, or its node.
            TransportTimeoutError: Another machine, or the owner, did not answer within `timeout_s`.
        """
        by_arena: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for i, read in enumerate(reads):
            _, machine, path, _ = read.shard.locator
            by_arena[read.shard.node_id, machine, path].append(i)
        found: dict[int, torch.Tensor] = {}
        for (node, machine, _), members in by_arena.items():
            wanted = [reads[i] for i in members]
            parts = (
                _read(wanted, timeout_s)
                if machine == _machine()
                else _read_elsewhere(node, wanted, timeout_s)
            )
            found.update(zip(members, parts, strict=True))
        return [found[i] for i in range(len(reads))]

    def collect(self, *, every_s: float = 0.0) -> None:
        """Take memory back that no handle refers to any more, if that was not done in the last `every_s`.

        `put` and `stats` do so, too.
        """
        with self._lock:
            now = time.monotonic()
            if not self._arenas or now - self._collected_at < every_s:
                return
            self._collected_at = now
            for token in self._unreferenced():
                for arena, place in self._lent.pop(token, ()):
                    self._released += arena.header.release(place.generation, [place.slot])
                    self._used_at[arena.path] = now
            for arena in [a for a in self._arenas if now - self._used_at[a.path] > self._idle_s]:
                if not len(arena.header.live):
                    self._drop(arena)

    def release(self, shards: Sequence[TensorShardInfo]) -> None:
        """Nothing to do: memory goes with the last handle on it."""

    def expire(self, before_step: int) -> int:  # noqa: ARG002
        """Nothing to do."""
        return 0

    @_FILES
    def stats(self) -> StoreStats:
        """What this process holds."""
        with self._lock:
            self.collect()
            return StoreStats(
                shards=sum(len(arena.header.live) for arena in self._arenas),
                held_bytes=self._held_bytes(),
                peak_bytes=self._peak,
                reserved_bytes=sum(arena.capacity for arena in self._arenas),
                put_shards=self._put,
                released_shards=self._released,
                leases=sum(not is_free(arena.path) for arena in self._arenas),
            )

    def close(self) -> None:
        """Give all memory back, whoever has handles on it; idempotent."""
        with self._lock:
            self._lent.clear()
            while self._arenas:
                self._drop(self._arenas[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._arena_bytes, self._idle_s)

    def _unreferenced(self) -> list[str]:
        """Tokens of what no handle refers to any more, as Ray told; asked only where it does not tell."""
        connection = _ray.connection_id()
        if connection != self._connection:
            self._connection, found = connection, list(self._lent)  # Nobody counts what an earlier one lent.
            self._asked_for.clear()
            return found
        found = [self._gone.popleft() for _ in range(len(self._gone))]
        started = time.monotonic()
        if self._asked_for and started >= self._ask_at:
            held = _ray.references_held() or frozenset()
            found += self._asked_for - held
            self._asked_for &= held
            ended = time.monotonic()
            self._ask_at = ended + _ASKING_SHARE * (ended - started)
        return found

    def _take(self, raws: Sequence[Bytes]) -> list[tuple[Arena, Place]] | None:
        """Copy runs of bytes into arenas, all or none; None where there is no memory for them."""
        taken: list[tuple[Arena, Place]] = []
        arena: Arena | None = None
        for raw in raws:
            place = arena.append(raw, None) if arena is not None else None
            if place is None:
                arena = self._free_arena(raw.nbytes)
                place = arena.append(raw, None) if arena is not None else None
            if arena is None or place is None:
                for owner, where in taken:
                    owner.header.release(where.generation, [where.slot])
                return None
            offset, slot = place
            taken.append((arena, Place(arena.header.generation, offset, slot)))
        return taken

    def _free_arena(self, size_bytes: int) -> Arena | None:
        """The smallest free arena that is large enough, else a new one, else None."""
        for arena in sorted(self._arenas, key=lambda a: a.capacity):
            if arena.capacity >= size_bytes and arena.recycle():
                self._used_at[arena.path] = time.monotonic()
                return arena
        capacity = _rounded(max(self._arena_bytes, size_bytes))
        if capacity > memory_left() // 2:
            return None
        try:
            arena = Arena(None, capacity)
        except TransportError:
            return None
        self._arenas.append(arena)
        self._used_at[arena.path] = time.monotonic()
        return arena

    def _drop(self, arena: Arena) -> None:
        self._arenas.remove(arena)
        del self._used_at[arena.path]
        arena.close()

    def _can_lend(self) -> bool:
        """Whether readers are on this machine, as far as one can tell, and Ray says who has handles."""
        return not self._machines.has_several() and hasattr(os, "memfd_create") and _ray.counts_references()

    def _held_bytes(self) -> int:
        return sum(int(arena.header.live[:, SIZE].sum()) for arena in self._arenas)


def _rebuild(arena_bytes: int, idle_s: float) -> NodeMemoryBackend:
    return NodeMemoryBackend(arena_bytes=arena_bytes, idle_s=idle_s)


def _read(reads: Sequence[ShardRead], timeout_s: float | None = None) -> list[torch.Tensor]:
    """Parts of one arena of a process on this machine."""
    path = reads[0].shard.locator[2]
    if not _ARENA_PATH.fullmatch(path):
        raise stale(reads[0].shard, f"{path!r} is no memory of a process")
    try:
        return read_arena(Path(path), reads, [read.shard.locator[3] for read in reads], timeout_s)
    except StaleHandleError as error:
        raise lost(reads, "the process that put it is gone") from error


def _read_elsewhere(node_id: str, reads: Sequence[ShardRead], timeout_s: float | None) -> list[torch.Tensor]:
    """Copies of parts, read by a process on the node of their owner."""
    plain = [dataclasses.replace(read, into=None) for read in reads]
    try:
        answer = _ray.call_on_node(node_id, _read_as_bytes, plain, timeout_s=timeout_s)
    except ShardLostError as error:
        if error.shard_id:
            raise
        raise lost(reads, error) from error
    return [
        tensor_from(raw, read.shard.torch_dtype, shape)
        for read, (raw, shape) in zip(reads, answer, strict=True)
    ]


def _read_as_bytes(reads: Sequence[ShardRead]) -> list[tuple[Bytes, tuple[int, ...]]]:
    return [(tensor_bytes(part), tuple(part.shape)) for part in _read(reads)]


@functools.cache
def _machine() -> str:
    """What two processes have in common that can open each other's files: the boot, and the process ids."""
    return f"{machine_name(Path('/proc'))}-{Path('/proc/self/ns/pid').stat().st_ino}"


def _rounded(size_bytes: int) -> int:
    """A size that batches of about the same size share: up to an eighth more."""
    unit = max(1 << 20, 1 << max(0, size_bytes.bit_length() - 4))
    return -(-size_bytes // unit) * unit
