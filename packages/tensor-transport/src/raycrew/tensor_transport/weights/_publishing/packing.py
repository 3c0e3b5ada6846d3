"""Copies tensors into arenas; a full one is sent while the next one fills."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from raycrew.tensor_transport.weights._publishing.placing import Placer
from raycrew.tensor_transport.weights._publishing.taking import Taken
from raycrew.tensor_transport.weights._update import TensorEntry, fresh_bucket, settle

Send = Callable[[int, torch.Tensor, list[TensorEntry], bool], None]
"""Takes a bucket's index, bytes and entries, and whether it is the last one.

The bytes may be overwritten when it returns.
"""


class Arenas:
    """Memory for buckets that are being packed or sent, kept warm from version to version."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """An arena of at least this size: uint8, of one dimension."""
        for i, arena in enumerate(self._free):
            if arena.numel() >= size_bytes and arena.device == device:
                return self._free.pop(i)
        if self._free:
            self._free.pop()
        return fresh_bucket(size_bytes, device)

    def give(self, arena: torch.Tensor) -> None:
        """Nobody uses it any more."""
        self._free.append(arena)

    def clear(self) -> None:
        """Give the memory back."""
        self._free = []


class Packer:
    """Packs one version.

    Args:
        placer: Where tensors go.
        arenas: Memory to pack into.
        send: What a full bucket goes to.
        bucket_bytes: Size of a bucket.
        device: Where they are packed.
        overlap: Send in a thread while the next bucket is packed; at most one is on its way.

    Attributes:
        waited_s: Seconds in which packing stood still for sending.
    """

    def __init__(
        self,
        placer: Placer,
        arenas: Arenas,
        send: Send,
        bucket_bytes: int,
        device: torch.device,
        *,
        overlap: bool,
    ) -> None:
        self._placer = placer
        self._arenas = arenas
        self._send = send
        self._bucket_bytes, self._device = bucket_bytes, device
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weight-put") if overlap else None
        self._sending: Future[None] | None = None
        self._arena = arenas.take(bucket_bytes, device)
        self._entries: list[TensorEntry] = []
        self._flushed = 0
        self.waited_s = 0.0

    def add_all(self, taken: Iterable[Taken]) -> None:
        """Copy tensors to their places, and keep none of them."""
        for each in taken:
            self.add(each)

    def add(self, taken: Taken) -> None:
        """Copy a tensor to its place."""
        entry = self._placer.place(taken.spec, taken.twin)
        if len(self._placer.sizes) > self._flushed:
            self._flush()
        self._entries.append(entry)
        if taken.twin is not None:
            return
        if entry.size_bytes > self._arena.numel():
            self._arenas.give(self._arena)
            self._arena = self._arenas.take(entry.size_bytes, self._device)
        if entry.size_bytes:
            copy = entry.view(self._arena)
            copy.copy_(taken.tensor)
            taken.copied(copy)

    def finish(self) -> None:
        """Send what is left, and wait until all is sent."""
        self._placer.close_bucket()
        if len(self._placer.sizes) > self._flushed:
            self._flush(is_last=True)
        self._await_sent()

    def close(self) -> None:
        """Give the memory back; what is being sent is waited for."""
        if self._pool is not None:
            self._pool.shutdown()
        self._arenas.give(self._arena)

    def _flush(self, *, is_last: bool = False) -> None:
        index, entries, arena = self._flushed, self._entries, self._arena
        self._flushed, self._entries = index + 1, []
        data = arena[: self._placer.sizes[index]]
        if self._pool is None:
            start = time.perf_counter()
            self._send(index, data, entries, is_last)
            self.waited_s += time.perf_counter() - start
            return
        self._await_sent()
        settle(self._device)
        self._arena = self._arenas.take(self._bucket_bytes, self._device)
        self._sending = self._pool.submit(self._send_and_give, index, data, entries, is_last, arena)

    def _send_and_give(
        self,
        index: int,
        data: torch.Tensor,
        entries: list[TensorEntry],
        is_last: bool,
        arena: torch.Tensor,
    ) -> None:
        try:
            self._send(index, data, entries, is_last)
        finally:
            self._arenas.give(arena)

    def _await_sent(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            start = time.perf_counter()
            sending.result()
            self.waited_s += time.perf_counter() - start
