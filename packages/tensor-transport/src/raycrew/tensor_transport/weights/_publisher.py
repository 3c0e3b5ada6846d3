"""The trainer's side: pack tensors into buckets, and publish them as one version."""

import dataclasses
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import numpy as np
import torch

from raycrew.tensor_transport._ray_compat import RayByteStore
from raycrew.tensor_transport.errors import TransportClosedError, TransportError
from raycrew.tensor_transport.protocols import Bytes, ByteStore
from raycrew.tensor_transport.weights._manifest import Bucket, TensorEntry, WeightUpdate, checksum, dtype_name
from raycrew.tensor_transport.weights._source import (
    SourceWatch,
    Weights,
    find_ties,
    listed,
    refuse_without_bytes,
)

_ALIGNMENT = 64


class WeightPublisher:
    """Publishes versions of a model's weights for any number of receivers.

    The bytes go bucket by bucket through one reused arena into a store, so that publishing needs one
    bucket of memory beside the store's. The latest complete version stays available for retries and
    late joiners; the one before it is released when a new one is complete.

    Threads take turns: a version is complete before the next one begins.

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
        self._lock = threading.RLock()
        self._publishing = False
        self._pid = os.getpid()

    @property
    def latest(self) -> WeightUpdate | None:
        """The latest complete version."""
        return self._latest

    def publish(self, weights: Weights, *, version: int | None = None) -> WeightUpdate:
        """Publish a state dict, or an iterator that yields (name, tensor), as one version.

        Tied tensors of a state dict (same memory, dtype, shape and strides) are sent once. A `DTensor` is
        gathered by its `full_tensor()`, a collective: the other ranks drain `gather_weights` meanwhile.

        Nobody may write to the tensors meanwhile, as a training step in another thread would: a version that
        mixes several states of the model is refused. (What cannot be seen is a writer that stands still, half
        done, during all of it.)

        Args:
            weights: The tensors; an iterator may make each one as it is asked for it, where all tensors of a
                mapping or list are held until the end.
            version: One more than the last version unless given.

        Raises:
            ValueError: `version` does not rise, a name comes twice, or there is no tensor.
            UnsupportedTensorError: A tensor has no plain bytes (quantised, sparse, meta).
            SourceChangedError: Tensors were written to meanwhile; the latest version stays what it was.
            TransportClosedError: The publisher is closed.
            TransportError: The publisher is another process's, or is publishing in this thread already.
        """
        with self._turn():
            if version is None:
                version = self._last_version + 1
            elif version <= self._last_version:
                raise ValueError(f"version must be above the last one, {self._last_version}, got {version}")
            update = self._pack(weights, version)
            self.release()
            self._latest, self._last_version = update, version
            return update

    def _pack(self, weights: Weights, version: int) -> WeightUpdate:
        packer = _Packer(self._store, self._bucket_bytes, self._arena)
        start = time.perf_counter()
        pairs, held = listed(weights)
        watch = SourceWatch(held=held)
        ties = find_ties(pairs) if held else {}
        try:
            for name, tensor in pairs:
                full = watch.gather(name, tensor)
                if (copy := packer.add(name, full, twin=ties.get(name))) is not None:
                    watch.copied(name, tensor, copy)
            packer.flush()
            if not packer.entries:
                raise ValueError("there is no tensor to publish")
            watch.check()
        except BaseException:
            self._release(packer.buckets)
            raise
        self._arena = packer.arena
        return WeightUpdate(
            publisher=self._name,
            version=version,
            tensors=tuple(packer.entries.values()),
            buckets=tuple(packer.buckets),
            gather_s=time.perf_counter() - start - packer.put_s,
            put_s=packer.put_s,
        )

    def release(self) -> None:
        """Give up the latest version; receivers that already fetch from Ray's store can finish."""
        with self._lock:
            latest, self._latest = self._latest, None
            if latest is not None:
                self._release(latest.buckets)

    def close(self) -> None:
        """Release everything, after a publication that is going on; idempotent."""
        with self._lock:
            self.release()
            self._arena = np.empty(0, dtype=np.uint8)
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until nobody else publishes: there is one arena, and one next version."""
        if os.getpid() != self._pid:
            raise TransportError(
                f"this WeightPublisher is that of process {self._pid}; after a fork, make another one"
            )
        with self._lock:
            if self._closed:
                raise TransportClosedError("this WeightPublisher is closed")
            if self._publishing:
                raise TransportError("publish() was called by the iterator that it takes its weights from")
            self._publishing = True
            try:
                yield
            finally:
                self._publishing = False

    def _release(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self._store.release(bucket.ticket)


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

    def add(self, name: str, tensor: torch.Tensor, *, twin: str | None = None) -> torch.Tensor | None:
        """Give `tensor` a place, that of the tensor named `twin` if there is one; returns a copy made."""
        if name in self.entries:
            raise ValueError(f"the name {name!r} comes twice")
        refuse_without_bytes(name, tensor)
        if twin is not None:
            self.entries[name] = dataclasses.replace(self.entries[twin], name=name)
            return None
        size = tensor.numel() * tensor.element_size()
        if self._used and self._used + size > self._bucket_bytes:
            self.flush()
        if size > self.arena.size:
            self.arena = np.empty(size, dtype=np.uint8)
        place = (len(self.buckets), self._used, size)
        entry = TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), *place)
        copy = entry.view(torch.from_numpy(self.arena))
        if size:
            copy.copy_(tensor)
        self.entries[name] = entry
        self._pending += 1
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return copy if size else None

    def flush(self) -> None:
        """Put what the arena holds into the store."""
        if not self._pending:
            return
        start = time.perf_counter()
        data = self.arena[: self._used]
        self.buckets.append(Bucket(self._store.put(data), data.size, checksum(data)))
        self._used = self._pending = 0
        self.put_s += time.perf_counter() - start
