"""Tensors in Ray's object store, owned by one store actor on each node."""

import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from raycrew.tensor_transport import _ray
from raycrew.tensor_transport._bytes import arrange, lost, stale, tensor_bytes
from raycrew.tensor_transport._rows import (
    ShardRead,
    StoreStats,
    TensorShardInfo,
    dtype_name,
    new_shard_id,
    total,
)
from raycrew.tensor_transport.backends._ledger import LedgerStore
from raycrew.tensor_transport.backends.ray_refs import read_objects
from raycrew.tensor_transport.errors import ShardLostError, TransportError

Slot = tuple[str, int, int, int]
"""(shard id, index of its buffer, offset, size)."""


class StoreActor(LedgerStore):
    """Owns the shards of one node; runs as a Ray actor, so that they outlive the workers that made them."""

    def __init__(self) -> None:
        super().__init__()
        self._epoch = uuid.uuid4().hex
        self._places: dict[str, tuple[Any, int]] = {}

    def keep(self, slots: Sequence[Slot], step: int | None, *buffers: Any) -> str:
        """Take buffers over; the epoch of this store."""
        refs = [_ray.put(buffer) for buffer in buffers]
        for shard_id, buffer, offset, size in slots:
            self._places[shard_id] = (refs[buffer], offset)
            self._ledger.add(shard_id, size, step)
        return self._epoch

    def resolve(self, epoch: str, shard_ids: Sequence[str]) -> tuple[str, list[tuple[Any, int] | None]]:
        """The epoch of this store, and where each shard is, None where it is gone."""
        if epoch != self._epoch:
            return self._epoch, [None] * len(shard_ids)
        return self._epoch, [self._places.get(shard_id) for shard_id in shard_ids]

    def _forget(self, shard_ids: Sequence[str]) -> None:
        for shard_id in shard_ids:
            del self._places[shard_id]


class ObjectStoreBackend:
    """Shards in the object store of the node that makes them, held by that node's store actor until released.

    Made by `start` in the driver, and passed to workers as an argument. Ray spills to disk what does not fit.

    Args:
        stores: The store actor of each node id.
        timeout_s: Deadline of calls to store actors that have none of their own.
    """

    scheme = "object_store"
    gives_own_memory = False

    def __init__(self, stores: Mapping[str, Any], *, timeout_s: float = 60.0) -> None:
        self._stores = dict(stores)
        self._timeout_s = timeout_s
        self._started_here = False
        self._session = _ray.Session.current()

    @classmethod
    def start(cls, node_ids: Sequence[str] | None = None, *, timeout_s: float = 60.0) -> Self:
        """Start a store actor on each node, all alive ones unless named. They end with the driver."""
        nodes = _ray.alive_node_ids() if node_ids is None else list(node_ids)
        backend = cls({node: _ray.start_on_node(StoreActor, node) for node in nodes}, timeout_s=timeout_s)
        backend._started_here = True
        backend.stats()
        return backend

    @property
    def node_ids(self) -> list[str]:
        """The nodes that have a store."""
        return list(self._stores)

    def put(self, tensors: Sequence[torch.Tensor], *, step: int | None = None) -> list[TensorShardInfo]:
        """Hand copies to this node's store; they are the store's when this returns.

        That takes two copies: an object of Ray belongs to who puts it, for good, so the store puts it again.
        """
        node = _ray.current_node_id()
        slots, buffers = arrange([tensor_bytes(tensor) for tensor in tensors])
        ids = [new_shard_id() for _ in tensors]
        table = [(i, s.buffer, s.offset, s.size_bytes) for i, s in zip(ids, slots, strict=True)]
        epoch = self._call([self._sent(node, "keep", table, step, *buffers)], self._timeout_s)[0]
        return [
            TensorShardInfo(self.scheme, shard_id, epoch, node, dtype_name(t.dtype), tuple(t.shape))
            for shard_id, t in zip(ids, tensors, strict=True)
        ]

    def fetch(self, reads: Sequence[ShardRead], *, timeout_s: float | None = None) -> list[torch.Tensor]:
        """Views of the object store's memory, which must not be written to."""
        owners: dict[tuple[str, str], list[int]] = defaultdict(list)
        for i, read in enumerate(reads):
            owners[read.shard.node_id, read.shard.owner].append(i)
        calls = [
            self._sent(node, "resolve", epoch, [reads[i].shard.shard_id for i in members])
            for (node, epoch), members in owners.items()
        ]
        try:
            answers = self._call(calls, timeout_s)
        except ShardLostError as error:
            gone = [read for read in reads if read.shard.node_id == error.node_id]
            raise lost(gone or reads, error) from error
        places: dict[int, tuple[Any, int]] = {}
        for ((_, epoch), members), (now, found) in zip(owners.items(), answers, strict=True):
            why = "it was released" if epoch == now else "its store was restarted since"
            for i, place in zip(members, found, strict=True):
                if place is None:
                    raise stale(reads[i].shard, why)
                places[i] = place
        return read_objects(reads, [places[i] for i in range(len(reads))], timeout_s)

    def release(self, shards: Sequence[TensorShardInfo]) -> None:
        """Forget shards in their stores; a store that is dead has forgotten them already."""
        by_node: dict[str, list[str]] = defaultdict(list)
        for shard in shards:
            by_node[shard.node_id].append(shard.shard_id)
        calls = [self._sent(node, "release", ids) for node, ids in by_node.items() if node in self._stores]
        self._call(calls, self._timeout_s, dead_is_fine=True)

    def expire(self, before_step: int) -> int:
        """Forget, on all nodes, what was put with an earlier step."""
        calls = [self._sent(node, "expire", before_step) for node in self._stores]
        return sum(n or 0 for n in self._call(calls, self._timeout_s, dead_is_fine=True))

    def clear_node(self, node_id: str) -> int:
        """Forget everything on one node; how many shards that were."""
        return int(self._call([self._sent(node_id, "clear")], self._timeout_s)[0])

    def stats(self) -> StoreStats:
        """The sum over all nodes."""
        return total(list(self.stats_by_node().values()))

    def stats_by_node(self) -> dict[str, StoreStats]:
        """What each node's store holds."""
        calls = [self._sent(node, "stats") for node in self._stores]
        return dict(zip(self._stores, self._call(calls, self._timeout_s), strict=True))

    def close(self) -> None:
        """End the store actors if this object started them; idempotent."""
        if self._started_here:
            _ray.end_actors(self._over(), *self._stores.values())
            self._started_here = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._stores, self._timeout_s)

    def _over(self) -> _ray.Session:
        """The connection that the stores' handles belong to."""
        return self._session or _ray.current_session()

    def _sent(self, node_id: str, method: str, *args: Any) -> tuple[str, Any]:
        """A call of a node's store, under way."""
        session = self._over()
        session.check()
        if (store := self._stores.get(node_id)) is None:
            nodes = ", ".join(self._stores)
            raise TransportError(f"node {node_id} has no store; there is one on: {nodes}")
        return node_id, _ray.send(session, getattr(store, method), *args)

    def _call(
        self, calls: Sequence[tuple[str, Any]], timeout_s: float | None, *, dead_is_fine: bool = False
    ) -> list[Any]:
        results = []
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for node, ref in calls:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                results.append(_ray.get(ref, left, self._over()))
            except ShardLostError as error:
                if not dead_is_fine:
                    raise ShardLostError(f"the store of node {node} died: {error}", node_id=node) from error
                results.append(None)
        return results


def _rebuild(stores: Mapping[str, Any], timeout_s: float) -> ObjectStoreBackend:
    return ObjectStoreBackend(stores, timeout_s=timeout_s)
