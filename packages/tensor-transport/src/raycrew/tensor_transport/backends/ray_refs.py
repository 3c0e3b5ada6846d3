"""Tensors in Ray's object store, kept alive by their handles."""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from raycrew.tensor_transport import _ray_compat
from raycrew.tensor_transport._arenas import arrange
from raycrew.tensor_transport._bytes import tensor_bytes, tensor_over
from raycrew.tensor_transport._shards import (
    ShardRead,
    StoreStats,
    TensorShardInfo,
    dtype_name,
    new_shard_id,
)
from raycrew.tensor_transport.errors import ShardLostError


class RayRefBackend:
    """Handles carry ObjectRefs: bytes go when the last handle goes, or with the process that put them.

    Small tensors of one call share a few objects, so an object goes when the last of its handles does.
    Nothing needs a release, and nothing outlives its maker; see `ObjectStoreBackend` for that.
    """

    scheme = "ray"
    gives_own_memory = False

    def __init__(self) -> None:
        self._put_shards = 0
        self._lock = threading.Lock()

    def put(self, tensors: Sequence[torch.Tensor], *, step: int | None = None) -> list[TensorShardInfo]:  # noqa: ARG002
        """Copy tensors into the object store of this node, small ones side by side."""
        slots, buffers = arrange([tensor_bytes(tensor) for tensor in tensors])
        refs = [_ray_compat.put(buffer) for buffer in buffers]
        node = _ray_compat.current_node_id()
        with self._lock:
            self._put_shards += len(tensors)
        return [
            TensorShardInfo(
                self.scheme,
                new_shard_id(),
                refs[slot.buffer].hex(),
                node,
                dtype_name(tensor.dtype),
                tuple(tensor.shape),
                (refs[slot.buffer], slot.offset),
            )
            for tensor, slot in zip(tensors, slots, strict=True)
        ]

    def fetch(self, reads: Sequence[ShardRead], *, timeout_s: float | None = None) -> list[torch.Tensor]:
        """Views of the object store's memory, which must not be written to."""
        refs = list(dict.fromkeys(read.shard.locator[0] for read in reads))
        try:
            found = dict(zip(refs, _ray_compat.get(refs, timeout_s), strict=True))
        except ShardLostError as error:
            names = ", ".join(sorted({f"{r.shard.shard_id} (node {r.shard.node_id})" for r in reads})[:3])
            first = reads[0].shard
            raise ShardLostError(
                f"one of {len(reads)} shards is lost, the first are {names}: {error}",
                shard_id=first.shard_id,
                owner=first.owner,
                node_id=first.node_id,
            ) from error
        return [view_of(found[read.shard.locator[0]], read.shard.locator[1], read) for read in reads]

    def release(self, shards: Sequence[TensorShardInfo]) -> None:
        """Nothing to do: an object goes with the last handle on it."""

    def expire(self, before_step: int) -> int:  # noqa: ARG002
        """Nothing to do."""
        return 0

    def stats(self) -> StoreStats:
        """How many this process has put; Ray counts the references."""
        return StoreStats(put_shards=self._put_shards)

    def close(self) -> None:
        """Nothing to do."""

    def __reduce__(self) -> tuple[type["RayRefBackend"], tuple[()]]:
        return RayRefBackend, ()


def view_of(data: Any, offset: int, read: ShardRead) -> torch.Tensor:
    """The wanted part of a shard that lies at `offset` of `data`."""
    shard = read.shard
    stored = tensor_over(data[offset : offset + shard.size_bytes], shard.torch_dtype, shard.shape)
    return read.of(stored)
