"""Small tensors inside their own handles."""

import threading
from collections.abc import Sequence

import torch

from raycrew.tensor_transport._bytes import tensor_bytes, tensor_over
from raycrew.tensor_transport._memory import remake_in_child
from raycrew.tensor_transport._shards import (
    ShardRead,
    StoreStats,
    TensorShardInfo,
    dtype_name,
    new_shard_id,
)


class InlineBackend:
    """The handle carries the bytes: nothing to look up, nothing to release. For tensors of up to some KiB."""

    scheme = "inline"
    gives_own_memory = True
    travels_with_handles = True

    def __init__(self) -> None:
        self._put_shards = 0
        self._lock = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """A thread that held the lock is not there to let go of it."""
        self._lock = threading.Lock()

    def put(self, tensors: Sequence[torch.Tensor], *, step: int | None = None) -> list[TensorShardInfo]:  # noqa: ARG002
        """Handles that hold copies."""
        with self._lock:
            self._put_shards += len(tensors)
        return [
            TensorShardInfo(
                self.scheme,
                new_shard_id(),
                "",
                "",
                dtype_name(t.dtype),
                tuple(t.shape),
                tensor_bytes(t).copy(),
            )
            for t in tensors
        ]

    def fetch(self, reads: Sequence[ShardRead], *, timeout_s: float | None = None) -> list[torch.Tensor]:  # noqa: ARG002
        """Copies of what the handles hold."""
        return [
            read.of(
                tensor_over(read.shard.locator.copy(), read.shard.torch_dtype, read.shard.shape)
            ).contiguous()
            for read in reads
        ]

    def release(self, shards: Sequence[TensorShardInfo]) -> None:
        """Nothing to do: the bytes go with their handles."""

    def expire(self, before_step: int) -> int:  # noqa: ARG002
        """Nothing to do."""
        return 0

    def stats(self) -> StoreStats:
        """How many were made; none is held here."""
        return StoreStats(put_shards=self._put_shards)

    def close(self) -> None:
        """Nothing to do."""

    def __reduce__(self) -> tuple[type["InlineBackend"], tuple[()]]:
        return InlineBackend, ()
