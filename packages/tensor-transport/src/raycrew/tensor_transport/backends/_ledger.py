"""The bookkeeping that stores share: what is held, since which step, and how much it was."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from raycrew.tensor_transport._bytes import remake_in_child
from raycrew.tensor_transport._rows import StoreStats

K = TypeVar("K")


@dataclass(slots=True)
class _Entry:
    size_bytes: int
    step: int | None


class Ledger(Generic[K]):
    """Shards held by key; thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[K, _Entry] = {}
        self._held = self._peak = self._put = self._released = 0
        self._lock = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """A thread that held the lock is not there to let go of it."""
        self._lock = threading.Lock()

    def add(self, key: K, size_bytes: int, step: int | None) -> None:
        """A shard was stored."""
        with self._lock:
            self._entries[key] = _Entry(size_bytes, step)
            self._put += 1
            self._held += size_bytes
            self._peak = max(self._peak, self._held)

    def remove(self, keys: Iterable[K]) -> list[K]:
        """Shards were released; those of `keys` that were held."""
        with self._lock:
            return [key for key in keys if self._remove(key)]

    def expire(self, before_step: int) -> list[K]:
        """Remove all of an earlier step; their keys."""
        with self._lock:
            old = [k for k, e in self._entries.items() if e.step is not None and e.step < before_step]
            return [key for key in old if self._remove(key)]

    def keys(self) -> list[K]:
        """All that is held."""
        with self._lock:
            return list(self._entries)

    def stats(self, *, reserved_bytes: int | None = None, leases: int = 0) -> StoreStats:
        """What is held."""
        with self._lock:
            steps = [entry.step for entry in self._entries.values() if entry.step is not None]
            reserved = self._held if reserved_bytes is None else reserved_bytes
            return StoreStats(
                shards=len(self._entries),
                held_bytes=self._held,
                peak_bytes=self._peak,
                reserved_bytes=reserved,
                put_shards=self._put,
                released_shards=self._released,
                oldest_step=min(steps, default=None),
                leases=leases,
            )

    def _remove(self, key: K) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._held -= entry.size_bytes
        self._released += 1
        return True


class LedgerStore(ABC):
    """What stores do by their ledger alone; each forgets in its own way what it held."""

    def __init__(self) -> None:
        self._ledger: Ledger[str] = Ledger()

    @abstractmethod
    def _forget(self, shard_ids: Sequence[str]) -> None:
        """Let go of shards that were held."""

    def release(self, shard_ids: Iterable[str]) -> int:
        """Forget some; how many were held."""
        return self._gone(self._ledger.remove(shard_ids))

    def expire(self, before_step: int) -> int:
        """Forget those of earlier steps; how many there were."""
        return self._gone(self._ledger.expire(before_step))

    def clear(self) -> int:
        """Forget all; how many there were."""
        return self._gone(self._ledger.remove(self._ledger.keys()))

    def stats(self) -> StoreStats:
        """What is held."""
        return self._ledger.stats()

    def _gone(self, shard_ids: Sequence[str]) -> int:
        self._forget(shard_ids)
        return len(shard_ids)
