"""Copies tensors into buckets; a full one is sent while the next one fills."""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from raycrew.tensor_transport._bytes import run_whole
from raycrew.tensor_transport.protocols import ByteStore
from raycrew.tensor_transport.weights._publishing.copying import Copying, Filling
from raycrew.tensor_transport.weights._publishing.glimpses import fold
from raycrew.tensor_transport.weights._publishing.placing import Placer
from raycrew.tensor_transport.weights._publishing.taking import Taken
from raycrew.tensor_transport.weights._update import (
    TensorEntry,
    device_of,
    fresh_bucket,
    put_tensor,
    reserve,
    settle,
)


@dataclass(eq=False)
class Room:
    """Memory that one bucket is packed into.

    Attributes:
        memory: uint8, [at least the bucket's size].
        ticket: What the store knows it by; None where it is no memory of the store.
        is_put: Whether the store has the bucket in it, and its ticket is known.
        is_given: Whether it was given back.
    """

    memory: torch.Tensor
    ticket: Any = None
    is_put: bool = False
    is_given: bool = False


class Rooms:
    """Memory to pack into: the store's own where it has some, else arenas, warm from version to version.

    Args:
        store: Where buckets go.
    """

    def __init__(self, store: ByteStore) -> None:
        self._store = store
        self._arenas: list[torch.Tensor] = []
        self._reserved: list[Room] = []

    def take(self, size_bytes: int) -> Room:
        """Room for a bucket of at most this size."""
        device = device_of(self._store)
        for i, arena in enumerate(self._arenas):
            if arena.numel() >= size_bytes and arena.device == device:
                return Room(self._arenas.pop(i))
        if self._arenas:
            self._arenas.pop()
        return Room(fresh_bucket(size_bytes, device))

    def reserve(self, size_bytes: int) -> Room:
        """Room for a bucket of exactly this size."""
        found: list[Room] = []

        def note() -> None:
            if (reserved := reserve(self._store, size_bytes)) is not None:
                found.append(Room(reserved[1], reserved[0]))
                self._reserved.append(found[0])

        if size_bytes:
            run_whole(note)
        return found[0] if found else self.take(size_bytes)

    def give_left(self) -> None:
        """Give what an interrupt has left, before it was known to who wanted it."""
        for room in tuple(self._reserved):
            self.give(room)

    def put(self, room: Room, size_bytes: int) -> Any:
        """Have the store keep a bucket; its ticket."""
        return put_tensor(self._store, room.memory[:size_bytes]) if room.ticket is None else room.ticket

    def give(self, room: Room) -> None:
        """Nobody writes to it any more; what the store has is the store's. Idempotent."""
        if room.ticket is not None:
            if not room.is_put:
                self._store.release(room.ticket)
            with contextlib.suppress(ValueError):  # another thread has
                self._reserved.remove(room)
        elif not room.is_given:
            room.is_given = True
            self._arenas.append(room.memory)

    def clear(self) -> None:
        """Give the memory back."""
        self._arenas = []
        self.give_left()


@dataclass(frozen=True, slots=True)
class Full:
    """A bucket to be sent.

    Attributes:
        index: Which one.
        room: Where it lies.
        size_bytes: How much of the room it takes.
        entries: The tensors in it.
        summed: Its checksum; None where that is yet to be made, if it is wanted.
        is_last: Whether it is the last one.
    """

    index: int
    room: Room
    size_bytes: int
    entries: list[TensorEntry]
    summed: int | None
    is_last: bool


Send = Callable[[Full], None]
"""Takes a full bucket, whose room may be used for something else when it returns."""


class Packer:
    """Packs one version.

    Args:
        placer: Where tensors go.
        rooms: Memory to pack into.
        send: What a full bucket goes to.
        bucket_bytes: Size of a bucket.
        sizes: Of all buckets, where they are known.
        checksums: Make checksums of what is copied anyway.
        overlap: Send in a thread while the next bucket is packed; at most one is on its way.

    Attributes:
        waited_s: Seconds in which packing stood still for sending.
    """

    def __init__(
        self,
        placer: Placer,
        rooms: Rooms,
        send: Send,
        bucket_bytes: int,
        *,
        sizes: Sequence[int] | None,
        checksums: bool,
        overlap: bool,
    ) -> None:
        self._placer = placer
        self._rooms = rooms
        self._send = send
        self._bucket_bytes, self._sizes, self._checksums = bucket_bytes, sizes, checksums
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weight-put") if overlap else None
        self._sending: Future[None] | None = None
        self._room: Room | None = None
        self._entries: list[TensorEntry] = []
        self._staying: list[Copying] = []
        self._fillings: deque[tuple[Filling, Full]] = deque()
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
        if taken.twin is None and entry.size_bytes:
            memory = self._room_for(entry.size_bytes).memory
            copying = Copying(taken.tensor, entry, memory, taken.copied)
            if taken.stays and memory.is_cpu:
                self._staying.append(copying)
                return
            self._send_filled()
            copying.copy_elements()
            if taken.copied is not None:
                taken.copied(fold(copying.copy))

    def finish(self) -> None:
        """Send what is left: all is copied."""
        self._placer.close_bucket()
        if len(self._placer.sizes) > self._flushed:
            self._flush(is_last=True)
        self._send_filled()

    def close(self) -> None:
        """Give the memory back; what is being sent is waited for, whatever becomes of it."""
        for filling, _ in self._fillings:
            filling.stop()
        if self._sending is not None and not self._sending.cancel():
            wait([self._sending])  # The pool does not know a thread whose start was interrupted.
        if self._pool is not None:
            self._pool.shutdown()
        for _, full in self._fillings:
            self._rooms.give(full.room)
        if self._room is not None:
            self._rooms.give(self._room)

    def _room_for(self, size_bytes: int) -> Room:
        """Room for the bucket that is being packed, whose first tensor, or only one, may be a large one."""
        if self._room is None:
            if self._sizes is not None:
                self._room = self._rooms.reserve(self._sizes[self._flushed])
            else:
                self._room = self._rooms.take(max(self._bucket_bytes, size_bytes))
        return self._room

    def _flush(self, *, is_last: bool = False) -> None:
        index, entries, room = self._flushed, self._entries, self._room_for(0)
        size_bytes = self._placer.sizes[index]
        staying, self._staying = self._staying, []
        full = Full(index, room, size_bytes, entries, None, is_last)
        if staying:
            filling = Filling(room.memory[:size_bytes].numpy(), staying, summed=self._checksums)
            for earlier, _ in self._fillings:
                earlier.copy()
            self._fillings.append((filling, full))
            filling.begin()
        # Helpers fill it while the next one is planned; but memory beside the store's is that of two buckets.
        self._send_filled(but=1 if staying and room.ticket is not None and not is_last else 0)
        if not staying:
            self._send_full(full)
        self._flushed, self._entries, self._room = index + 1, [], None

    def _send_filled(self, *, but: int = 0) -> None:
        """Send the buckets that helpers have begun to fill, except the last ones."""
        while len(self._fillings) > but:
            filling, full = self._fillings[0]
            filling.copy()
            self._send_full(dataclasses.replace(full, summed=filling.finish()))
            self._fillings.popleft()

    def _send_full(self, full: Full) -> None:
        if self._pool is None:
            start = time.perf_counter()
            self._send_and_give(full)
            self.waited_s += time.perf_counter() - start
        else:
            self.await_sent()
            settle(full.room.memory.device)
            sending: Future[None] = Future()
            self._sending = sending
            self._pool.submit(self._send_beside, sending, full)

    def _send_beside(self, sending: "Future[None]", full: Full) -> None:
        if not sending.set_running_or_notify_cancel():
            self._rooms.give(full.room)
            return
        try:
            self._send_and_give(full)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that packs
            sending.set_exception(error)
        else:
            sending.set_result(None)

    def _send_and_give(self, full: Full) -> None:
        try:
            self._send(full)
        finally:
            self._rooms.give(full.room)

    def await_sent(self) -> None:
        """Wait until all that is full was sent; raises what sending raised."""
        if self._sending is not None:
            start = time.perf_counter()
            self._sending.result()
            self._sending = None
            self.waited_s += time.perf_counter() - start
