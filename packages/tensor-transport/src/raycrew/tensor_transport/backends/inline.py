"""Small tensors inside their own handles."""

from collections.abc import Sequence

import torch

from raycrew.tensor_transport._bytes import tensor_bytes, tensor_over
from raycrew.tensor_transport._rows import ShardRead, TensorShardInfo, dtype_name, new_shard_id
from raycrew.tensor_transport.backends._carried import CarriedByHandles


class InlineBackend(CarriedByHandles):
    """The handle carries the bytes: nothing to look up, nothing to release. For tensors of up to some KiB."""

    scheme = "inline"
    gives_own_memory = True

    def put(self, tensors: Sequence[torch.Tensor], *, step: int | None = None) -> list[TensorShardInfo]:  # noqa: ARG002
        """Handles that hold copies."""
        self._count(len(tensors))
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

    def __reduce__(self) -> tuple[type["InlineBackend"], tuple[()]]:
        return InlineBackend, ()
