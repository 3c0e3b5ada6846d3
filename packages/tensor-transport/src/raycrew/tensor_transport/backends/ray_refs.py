"""Tensors in Ray's object store, kept alive by their handles."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from raycrew.tensor_transport import _ray
from raycrew.tensor_transport._bytes import arrange, lost, tensor_bytes, tensor_over, unlocked
from raycrew.tensor_transport._rows import ShardRead, TensorShardInfo, dtype_name, new_shard_id
from raycrew.tensor_transport.backends._carried import CarriedByHandles
from raycrew.tensor_transport.errors import ShardLostError, TransportTimeoutError


class RayRefBackend(CarriedByHandles):
    """Handles carry ObjectRefs: bytes go when the last handle goes, or with the process that put them.

    Small tensors of one call share a few objects, so an object goes when the last of its handles does.
    Nothing needs a release, and nothing outlives its maker; see `ObjectStoreBackend` for that.
    """

    scheme = "ray"
    gives_own_memory = False

    def put(self, tensors: Sequence[torch.Tensor], *, step: int | None = None) -> list[TensorShardInfo]:  # noqa: ARG002
        """Copy tensors into the object store of this node, small ones side by side."""
        slots, buffers = arrange([tensor_bytes(tensor) for tensor in tensors])
        refs = [_ray.put(buffer) for buffer in buffers]
        node = _ray.current_node_id()
        self._count(len(tensors))
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
        return read_objects(reads, [read.shard.locator for read in reads], timeout_s)

    def __reduce__(self) -> tuple[type["RayRefBackend"], tuple[()]]:
        return RayRefBackend, ()


def read_objects(
    reads: Sequence[ShardRead], places: Sequence[tuple[Any, int]], timeout_s: float | None
) -> list[torch.Tensor]:
    """Views of objects: each read's (ref, offset) is in `places`.

    Raises:
        ShardLostError: Objects are lost; it names a shard in one of them.
        TransportTimeoutError: They did not arrive within `timeout_s`.
    """
    refs = list(dict.fromkeys(ref for ref, _ in places))
    try:
        objects = _ray.get(refs, timeout_s)
    except ShardLostError as error:
        gone = set(_lost_among(refs))
        raise lost(
            [r for r, (ref, _) in zip(reads, places, strict=True) if ref in gone or not gone], error
        ) from error
    found = {ref: unlocked(data) for ref, data in zip(refs, objects, strict=True)}
    return [_view_of(found[ref], offset, read) for read, (ref, offset) in zip(reads, places, strict=True)]


def _lost_among(refs: Sequence[Any], within_s: float = 10.0) -> list[Any]:
    """Which of several objects are lost, as far as that is known in time: some are."""
    deadline = time.monotonic() + within_s
    found: list[Any] = []
    while not found and (left := deadline - time.monotonic()) > 0:
        for ref in refs:
            try:
                _ray.get(ref, timeout_s=min(1.0, left))
            except ShardLostError:
                found.append(ref)
            except TransportTimeoutError:
                if time.monotonic() > deadline:
                    break
    return found


def _view_of(data: Any, offset: int, read: ShardRead) -> torch.Tensor:
    """The wanted part of a shard that lies at `offset` of `data`."""
    shard = read.shard
    stored = tensor_over(data[offset : offset + shard.size_bytes], shard.torch_dtype, shard.shape)
    return read.of(stored)
