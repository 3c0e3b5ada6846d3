"""A bounded cache of fetched shards."""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raycrew.tensor_transport._bytes import remake_in_child


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache holds, and how often it helped.

    Attributes:
        hits: Reads that asked no backend; those that waited for another thread's fetch are among them.
        misses: Reads that asked one.
        shards: Shards held.
        held_bytes: Their bytes.
        max_bytes: The most that is held.
    """

    hits: int
    misses: int
    shards: int
    held_bytes: int
    max_bytes: int


class Flight:
    """The fetch of a shard that one thread makes, and others wait for."""

    def __init__(self, shard_id: str) -> None:
        self.shard_id = shard_id
        self.tensor: torch.Tensor | None = None
        self._landed = threading.Event()

    def land(self, tensor: torch.Tensor | None) -> None:
        """It is here; None where it failed. Only the first time counts."""
        if not self._landed.is_set():
            self.tensor = tensor
            self._landed.set()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it landed in time."""
        return self._landed.wait(timeout_s)


class Look(NamedTuple):
    """What a cache knows of a shard: its tensor, a fetch to wait for, a fetch that the caller has to make."""

    tensor: torch.Tensor | None = None
    awaited: Flight | None = None
    begun: Flight | None = None


class FetchCache:
    """The least recently used go first once `max_bytes` are held. One fetch serves all threads."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, got {max_bytes}")
        self.max_bytes = max_bytes
        self._held: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._flights: dict[str, Flight] = {}
        self._bytes = self._hits = self._misses = 0
        self._lock = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """A child starts empty: the threads that fetch, or hold the lock, are not there."""
        self._held, self._flights = OrderedDict(), {}
        self._bytes = self._hits = self._misses = 0
        self._lock = threading.Lock()

    def __contains__(self, shard_id: object) -> bool:
        """Whether a shard is held; that is no use of it."""
        with self._lock:
            return shard_id in self._held

    @property
    def stats(self) -> CacheStats:
        """Counts so far."""
        with self._lock:
            return CacheStats(self._hits, self._misses, len(self._held), self._bytes, self.max_bytes)

    def look(self, shard_id: str, size_bytes: int, *, fetch: bool) -> Look:
        """A shard of this size, which must not be written to.

        With `fetch`, the caller will fetch the whole shard if nobody has it: it is told to wait for a thread
        that does so already, or has to `land` the flight that is begun for it, whatever comes of it.
        """
        if size_bytes > self.max_bytes:
            return Look()
        with self._lock:
            tensor = self._held.get(shard_id)
            if tensor is not None:
                self._hits += 1
                self._held.move_to_end(shard_id)
                return Look(tensor)
            if fetch and (flight := self._flights.get(shard_id)) is not None:
                self._hits += 1
                return Look(awaited=flight)
            self._misses += 1
            if not fetch:
                return Look()
            flight = self._flights[shard_id] = Flight(shard_id)
            return Look(begun=flight)

    def land(self, flight: Flight, tensor: torch.Tensor | None = None) -> None:
        """Hand what was fetched to whoever waits, and keep it, unless the shard was forgotten meanwhile."""
        with self._lock:
            if self._flights.get(flight.shard_id) is flight:
                del self._flights[flight.shard_id]
                if tensor is not None:
                    self._keep(flight.shard_id, tensor)
        flight.land(tensor)

    def forget(self, shard_id: str) -> None:
        """Drop one shard."""
        with self._lock:
            self._flights.pop(shard_id, None)
            self._drop(shard_id)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._flights.clear()
            self._held.clear()
            self._bytes = 0

    def _keep(self, shard_id: str, tensor: torch.Tensor) -> None:
        self._drop(shard_id)
        self._held[shard_id] = tensor
        self._bytes += tensor.nbytes
        while self._bytes > self.max_bytes:
            self._drop(next(iter(self._held)))

    def _drop(self, shard_id: str) -> None:
        tensor = self._held.pop(shard_id, None)
        if tensor is not None:
            self._bytes -= tensor.nbytes
