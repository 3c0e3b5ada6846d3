"""A bounded cache of fetched shards."""

import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache holds, and how often it helped."""

    hits: int
    misses: int
    shards: int
    held_bytes: int
    max_bytes: int


class FetchCache:
    """The least recently used go first once `max_bytes` are held; thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, got {max_bytes}")
        self.max_bytes = max_bytes
        self._held: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._bytes = self._hits = self._misses = 0
        self._lock = threading.Lock()

    @property
    def stats(self) -> CacheStats:
        """Counts so far."""
        with self._lock:
            return CacheStats(self._hits, self._misses, len(self._held), self._bytes, self.max_bytes)

    def get(self, shard_id: str) -> torch.Tensor | None:
        """A cached shard, which must not be written to."""
        with self._lock:
            tensor = self._held.get(shard_id)
            if tensor is None:
                self._misses += 1
                return None
            self._hits += 1
            self._held.move_to_end(shard_id)
            return tensor

    def offer(self, shard_id: str, tensor: torch.Tensor) -> bool:
        """Keep a whole shard if it fits; whether it is kept (and must then not be written to)."""
        if tensor.nbytes > self.max_bytes:
            return False
        with self._lock:
            self._drop(shard_id)
            self._held[shard_id] = tensor
            self._bytes += tensor.nbytes
            while self._bytes > self.max_bytes:
                self._drop(next(iter(self._held)))
            return True

    def forget(self, shard_id: str) -> None:
        """Drop one shard."""
        with self._lock:
            self._drop(shard_id)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._held.clear()
            self._bytes = 0

    def _drop(self, shard_id: str) -> None:
        tensor = self._held.pop(shard_id, None)
        if tensor is not None:
            self._bytes -= tensor.nbytes
