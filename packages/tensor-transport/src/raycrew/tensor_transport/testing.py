"""Fakes for tests without Ray, and the conformance functions that every implementation passes."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raycrew.tensor_transport.errors import ShardLostError
from raycrew.tensor_transport.protocols import Bytes


class InProcessByteStore:
    """A `ByteStore` in a dictionary, which can lose or damage what it holds."""

    def __init__(self) -> None:
        self.held: dict[int, Bytes] = {}
        self.reads = 0
        self._tickets = itertools.count()
        self._lock = threading.Lock()

    def put(self, data: Bytes) -> int:
        """Keep a copy."""
        kept = data.copy()
        kept.flags.writeable = False
        with self._lock:
            ticket = next(self._tickets)
            self.held[ticket] = kept
        return ticket

    def get(self, ticket: int, timeout_s: float | None = None) -> Bytes:  # noqa: ARG002
        """The bytes, or `ShardLostError`."""
        with self._lock:
            self.reads += 1
            if ticket not in self.held:
                raise ShardLostError(f"no bytes under ticket {ticket}", shard_id=str(ticket))
            return self.held[ticket]

    def release(self, ticket: int) -> None:
        """Forget the bytes."""
        with self._lock:
            self.held.pop(ticket, None)

    def damage(self, ticket: int, position: int = 0) -> None:
        """Flip one bit of what is held."""
        broken = self.held[ticket].copy()
        broken[position] ^= 1
        broken.flags.writeable = False
        self.held[ticket] = broken


@dataclass(frozen=True)
class LocalRank:
    """A rank of `LocalPeers`."""

    rank: int
    node_id: str = "local"
    device_index: int | None = None


@dataclass(frozen=True)
class LocalResults:
    """Results that are there already."""

    results: list[Any]

    def get_results(self, *, timeout: float | None = None) -> list[Any]:  # noqa: ARG002
        """The results in rank order."""
        return self.results


class LocalPeers:
    """A `PeerGroup` of plain objects in this process, called one after another."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = dict(enumerate(workers))

    @property
    def ranks(self) -> Sequence[LocalRank]:
        """One entry per object."""
        return [LocalRank(rank) for rank in self._workers]

    def call(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> LocalResults:
        """Call the method on every object."""
        name = method if isinstance(method, str) else method.__name__
        return LocalResults([getattr(worker, name)(*args, **kwargs) for worker in self._workers.values()])

    def on(self, *, ranks: Sequence[int]) -> "LocalPeers":
        """Some of the objects, under their own ranks."""
        chosen = LocalPeers(())
        chosen._workers = _pick(self._workers, ranks)
        return chosen


def _pick(workers: Mapping[int, Any], ranks: Sequence[int]) -> dict[int, Any]:
    unknown = [rank for rank in ranks if rank not in workers]
    if unknown:
        raise ValueError(f"no such ranks: {unknown}; there are {list(workers)}")
    return {rank: workers[rank] for rank in ranks}
