"""Tensors in shared memory of one machine, read in place through private mappings."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raycrew.tensor_transport._bytes import (
    NO_STEP,
    STEP,
    ArenaSession,
    Place,
    Spot,
    is_arena,
    named_errors,
    read_arena,
    stale,
    tensor_bytes,
)
from raycrew.tensor_transport._rows import (
    ShardRead,
    StoreStats,
    TensorShardInfo,
    dtype_name,
    new_shard_id,
)
from raycrew.tensor_transport.errors import ShardLostError, TransportError

_FILES = named_errors("shared memory")


class SharedMemoryBackend:
    """Shards in arenas of shared memory, reused once every shard in them is released and nobody reads them.

    Reading maps an arena privately, once per process for what is in it by then: no copy, and a write stays
    with its reader, for whom the memory lives as long as the tensor. What is less than a megabyte, or than an
    eighth of its arena, is copied, so that tensors that are kept hold on to at most eight times their memory;
    so is what another result has in place already. Keep a `clone()` of a small part of a large read.

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
        self._above = Path(directory)
        self._arena_bytes, self._max_bytes = arena_bytes, max_bytes
        self._arenas = ArenaSession(
            type(self).__name__, session, arena_bytes=arena_bytes, max_bytes=max_bytes, directory=self._above
        )

    @property
    def session(self) -> str:
        """Name of the session."""
        return self._arenas.name

    @_FILES
    def put(self, tensors: Sequence[torch.Tensor], *, step: int | None = None) -> list[TensorShardInfo]:
        """Copy tensors into arenas that are warm where possible.

        Raises:
            TransportError: There is no room, or `max_bytes` is reached.
            TransportClosedError: The backend is closed.
        """
        spots = self._arenas.put([tensor_bytes(tensor) for tensor in tensors], step)
        epoch, machine = self._arenas.epoch, self._arenas.machine
        return [
            TensorShardInfo(
                self.scheme,
                new_shard_id(),
                epoch,
                machine,
                dtype_name(tensor.dtype),
                tuple(tensor.shape),
                tuple(spot),
            )
            for tensor, spot in zip(tensors, spots, strict=True)
        ]

    @_FILES
    def fetch(self, reads: Sequence[ShardRead], *, timeout_s: float | None = None) -> list[torch.Tensor]:
        """The wanted parts: in place for a megabyte and more, else copies.

        Raises:
            StaleHandleError: A shard was released, or its session is over.
            ShardLostError: A shard is on another machine.
            TransportTimeoutError: An owner held an arena for longer than `timeout_s`.
            TransportError: There are no descriptors, or no memory, to map an arena.
        """
        self._arenas.check_open()
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
        for shard in shards:
            self._path_of(shard)
        self._arenas.release([Spot(*shard.locator) for shard in shards])

    @_FILES
    def expire(self, before_step: int) -> int:
        """Release what any process of the session put with an earlier step."""
        return self._arenas.release_where(
            lambda slots: (slots[:, STEP] != NO_STEP) & (slots[:, STEP] < before_step)
        )

    @property
    def node_ids(self) -> list[str]:
        """This machine, as its shards name it."""
        return [self._arenas.machine]

    @_FILES
    def clear_node(self, node_id: str) -> int:
        """Release everything that the session holds on this machine; how many shards that were."""
        if node_id != self._arenas.machine:
            raise TransportError(f"this is machine {self._arenas.machine}, not {node_id}")
        return self._arenas.release_where(lambda slots: np.ones(len(slots), bool))

    @_FILES
    def stats(self) -> StoreStats:
        """What the whole session holds on this machine; counts of puts and releases are this process's."""
        return self._arenas.stats()

    @_FILES
    def close(self) -> None:
        """Leave the session; the last process to leave removes what is left of it. Idempotent."""
        self._arenas.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.session, self._arena_bytes, self._max_bytes, str(self._above))

    def _path_of(self, shard: TensorShardInfo) -> Path:
        """The arena of a shard, whose name came with a handle."""
        name = shard.locator[0]
        if not is_arena(name):
            raise stale(shard, f"{name!r} is no name of an arena")
        return self._arenas.path(name)

    def _check_here(self, shard: TensorShardInfo) -> None:
        if shard.node_id != self._arenas.machine:
            raise ShardLostError(
                f"shard {shard.shard_id} is in the shared memory of another machine ({shard.node_id}, "
                f"this is {self._arenas.machine}): use a backend that reaches it",
                **shard.identity,
            )


def _rebuild(session: str, arena_bytes: int, max_bytes: int | None, directory: str) -> SharedMemoryBackend:
    return SharedMemoryBackend(session, arena_bytes=arena_bytes, max_bytes=max_bytes, directory=directory)
