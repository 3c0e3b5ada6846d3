"""The trainer's side: pack tensors into buckets, and publish them as one version."""

import dataclasses
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from raycrew.tensor_transport._ray_compat import RayByteStore
from raycrew.tensor_transport.errors import TransportClosedError, UnsupportedTensorError
from raycrew.tensor_transport.protocols import Bytes, ByteStore
from raycrew.tensor_transport.weights._manifest import Bucket, TensorEntry, WeightUpdate, checksum, dtype_name

Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

_ALIGNMENT = 64


class WeightPublisher:
    """Publishes versions of a model's weights for any number of receivers.

    The bytes go bucket by bucket through one reused arena into a store, so that publishing needs one
    bucket of memory beside the store's. The latest complete version stays available for retries and
    late joiners; the one before it is released when a new one is complete.

    Args:
        store: Where the buckets go: Ray's object store unless given.
        bucket_bytes: Size of a bucket; a larger tensor has a bucket of its own.
    """

    def __init__(self, store: ByteStore | None = None, *, bucket_bytes: int = 16 << 20) -> None:
        if bucket_bytes < _ALIGNMENT:
            raise ValueError(f"bucket_bytes must be at least {_ALIGNMENT}, got {bucket_bytes}")
        self._store = store if store is not None else RayByteStore()
        self._bucket_bytes = bucket_bytes
        self._arena = np.empty(0, dtype=np.uint8)
        self._name = uuid.uuid4().hex
        self._latest: WeightUpdate | None = None
        self._last_version = 0
        self._closed = False

    @property
    def latest(self) -> WeightUpdate | None:
        """The latest complete version."""
        return self._latest

    def publish(self, weights: Weights, *, version: int | None = None) -> WeightUpdate:
        """Publish a state dict, or an iterator that yields (name, tensor), as one version.

        Tied tensors of a state dict (same memory, dtype, shape and strides) are sent once. A `DTensor` is
        gathered by its `full_tensor()`, a collective: the other ranks drain `gather_weights` meanwhile.

        Args:
            weights: The tensors; an iterator may make each one as it is asked for it.
            version: One more than the last version unless given.

        Raises:
            ValueError: `version` does not rise, a name comes twice, or there is no tensor.
            UnsupportedTensorError: A tensor has no plain bytes (quantised, sparse, meta).
            TransportClosedError: The publisher is closed.
        """
        if self._closed:
            raise TransportClosedError("this WeightPublisher is closed")
        if version is None:
            version = self._last_version + 1
        elif version <= self._last_version:
            raise ValueError(f"version must be above the last one, {self._last_version}, got {version}")
        packer = _Packer(self._store, self._bucket_bytes, self._arena)
        start = time.perf_counter()
        try:
            ties = find_ties(weights) if isinstance(weights, Mapping) else {}
            for name, tensor in gather_weights(weights):
                packer.add(name, tensor, twin=ties.get(name))
            packer.flush()
        except BaseException:
            self._release(packer.buckets)
            raise
        if not packer.entries:
            raise ValueError("there is no tensor to publish")
        self._arena = packer.arena
        update = WeightUpdate(
            publisher=self._name,
            version=version,
            tensors=tuple(packer.entries.values()),
            buckets=tuple(packer.buckets),
            gather_s=time.perf_counter() - start - packer.put_s,
            put_s=packer.put_s,
        )
        self.release()
        self._latest, self._last_version = update, version
        return update

    def release(self) -> None:
        """Give up the latest version; receivers that already fetch from Ray's store can finish."""
        if self._latest is not None:
            self._release(self._latest.buckets)
            self._latest = None

    def close(self) -> None:
        """Release everything; idempotent."""
        self.release()
        self._arena = np.empty(0, dtype=np.uint8)
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _release(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self._store.release(bucket.ticket)


def gather_weights(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of each weight; ranks that do not publish drain it to take part in gathering."""
    items = weights.items() if isinstance(weights, Mapping) else weights
    for name, tensor in items:
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedTensorError(f"{name!r} is a {type(tensor).__name__}, not a tensor", name=name)
        full = getattr(tensor, "full_tensor", None)
        yield name, full() if callable(full) else tensor.detach()


def find_ties(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Name -> the earlier name of the same memory (equal address, dtype, shape and strides)."""
    first: dict[tuple[Any, ...], str] = {}
    ties = {}
    for name, tensor in weights.items():
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.layout != torch.strided
            or tensor.device.type == "meta"
        ):
            continue
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if not local.numel():
            continue
        place = (local.device, local.data_ptr(), local.dtype, tuple(tensor.shape), local.stride())
        if place in first:
            ties[name] = first[place]
        else:
            first[place] = name
    return ties


class _Packer:
    """Copies tensors into the arena, and the arena into the store whenever it is full."""

    def __init__(self, store: ByteStore, bucket_bytes: int, arena: Bytes) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self.buckets: list[Bucket] = []
        self.put_s = 0.0
        self.arena = arena if arena.size >= bucket_bytes else np.empty(bucket_bytes, dtype=np.uint8)
        self._store = store
        self._bucket_bytes = bucket_bytes
        self._used = 0
        self._pending = 0

    def add(self, name: str, tensor: torch.Tensor, *, twin: str | None = None) -> None:
        """Give `tensor` a place, that of the tensor named `twin` where there is one."""
        if name in self.entries:
            raise ValueError(f"the name {name!r} comes twice")
        _refuse_without_bytes(name, tensor)
        if twin is not None:
            self.entries[name] = dataclasses.replace(self.entries[twin], name=name)
            return
        size = tensor.numel() * tensor.element_size()
        if self._used and self._used + size > self._bucket_bytes:
            self.flush()
        if size > self.arena.size:
            self.arena = np.empty(size, dtype=np.uint8)
        place = (len(self.buckets), self._used, size)
        entry = TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), *place)
        if size:
            entry.view(torch.from_numpy(self.arena)).copy_(tensor)
        self.entries[name] = entry
        self._pending += 1
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT

    def flush(self) -> None:
        """Put what the arena holds into the store."""
        if not self._pending:
            return
        start = time.perf_counter()
        data = self.arena[: self._used]
        self.buckets.append(Bucket(self._store.put(data), data.size, checksum(data)))
        self._used = self._pending = 0
        self.put_s += time.perf_counter() - start


def _refuse_without_bytes(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
    elif tensor.is_quantized:
        kind = "quantised"
    elif tensor.device.type == "meta":
        kind = "meta"
    else:
        return
    raise UnsupportedTensorError(f"{name!r} is a {kind} tensor: it has no plain bytes to send", name=name)
