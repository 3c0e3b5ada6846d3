"""Fakes for tests without Ray."""

import itertools
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raycrew.tensor_transport._rows import ShardRead, StoreStats, TensorShardInfo, dtype_name, new_shard_id
from raycrew.tensor_transport.backends import Ledger
from raycrew.tensor_transport.errors import ShardLostError, StaleHandleError
from raycrew.tensor_transport.protocols import Bytes


class InProcessByteStore:
    """A `ByteStore` in a dictionary, which can lose or damage what it holds."""

    def __init__(self) -> None:
        self.held: dict[int, Bytes] = {}
        self.reads = 0
        self.release_scope = uuid.uuid4().hex
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

    def on(self, ranks: Sequence[int]) -> "LocalPeers":
        """Some of the objects, under their own ranks."""
        chosen = LocalPeers(())
        chosen._workers = _pick(self._workers, ranks)
        return chosen


def _pick(workers: Mapping[int, Any], ranks: Sequence[int]) -> dict[int, Any]:
    unknown = [rank for rank in ranks if rank not in workers]
    if unknown:
        raise ValueError(f"no such ranks: {unknown}; there are {list(workers)}")
    return {rank: workers[rank] for rank in ranks}


class InProcessBackend:
    """A `ShardBackend` in a dictionary, which counts what is read."""

    gives_own_memory = True
    reads_over_network = True

    def __init__(self, scheme: str = "memory") -> None:
        self.scheme = scheme
        self.reads = self.fetches = self.rows_read = 0
        self._held: dict[str, torch.Tensor] = {}
        self._ledger: Ledger[str] = Ledger()

    def put(self, tensors: Sequence[torch.Tensor], *, step: int | None = None) -> list[TensorShardInfo]:
        """Keep copies."""
        shards = []
        for tensor in tensors:
            shard = TensorShardInfo(
                self.scheme, new_shard_id(), "memory", "", dtype_name(tensor.dtype), tuple(tensor.shape)
            )
            self._held[shard.shard_id] = tensor.detach().clone()
            self._ledger.add(shard.shard_id, tensor.nbytes, step)
            shards.append(shard)
        return shards

    def fetch(self, reads: Sequence[ShardRead], *, timeout_s: float | None = None) -> list[torch.Tensor]:  # noqa: ARG002
        """Copies of the wanted parts."""
        self.fetches += 1
        found = []
        for read in reads:
            if read.shard.shard_id not in self._held:
                message = f"shard {read.shard.shard_id} was released"
                raise StaleHandleError(message, shard_id=read.shard.shard_id, owner="memory")
            part = read.of(self._held[read.shard.shard_id])
            self.reads += 1
            self.rows_read += len(part) if part.ndim else 1
            found.append(part.clone())
        return found

    def release(self, shards: Sequence[TensorShardInfo]) -> None:
        """Forget shards."""
        self._forget(self._ledger.remove([shard.shard_id for shard in shards]))

    def expire(self, before_step: int) -> int:
        """Forget what was put with an earlier step."""
        return self._forget(self._ledger.expire(before_step))

    def stats(self) -> StoreStats:
        """What is held."""
        return self._ledger.stats()

    def close(self) -> None:
        """Forget everything."""
        self._forget(self._ledger.remove(self._ledger.keys()))

    def _forget(self, shard_ids: Sequence[str]) -> int:
        for shard_id in shard_ids:
            del self._held[shard_id]
        return len(shard_ids)
