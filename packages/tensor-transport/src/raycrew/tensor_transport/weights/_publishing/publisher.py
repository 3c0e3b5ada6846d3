"""The trainer's side: pack tensors into buckets, and publish them as one version."""

import operator
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import SupportsIndex

import torch

from raycrew.tensor_transport._bytes import Belonging
from raycrew.tensor_transport.errors import DirectoryLostError, TransportClosedError, TransportError
from raycrew.tensor_transport.protocols import ByteStore
from raycrew.tensor_transport.transports import PullTransport
from raycrew.tensor_transport.weights._directory import (
    Announced,
    DirectoryTeller,
    LoneTeller,
    Teller,
    WeightDirectory,
)
from raycrew.tensor_transport.weights._publishing.keeping import Keeping
from raycrew.tensor_transport.weights._publishing.packing import Full, Packer, Rooms
from raycrew.tensor_transport.weights._publishing.placing import ALIGNMENT, Placer, PlanCache
from raycrew.tensor_transport.weights._publishing.selection import Rename, Select, Selection, Transform
from raycrew.tensor_transport.weights._publishing.source import Weights
from raycrew.tensor_transport.weights._publishing.taking import Taking
from raycrew.tensor_transport.weights._update import (
    BroadcastStore,
    Bucket,
    BucketPlan,
    Stopwatch,
    WeightUpdate,
    abandon,
    as_store,
    bucket_bytes_for,
    checksum,
)

_LAST_VERSION = 2**63 - 1
"""What a row's tag can hold."""
_BROADCAST_BUCKETS = 4
"""So many buckets may be under way at a time to receivers that take part all together."""


class WeightPublisher(Belonging):
    """Publishes versions of a model's weights for any number of receivers.

    The bytes go bucket by bucket into a store: straight into its memory where that is shared memory and the
    sizes of all tensors are known, else through reused arenas, so that publishing needs two buckets of memory
    beside the store's. The latest complete version stays available for retries and
    late joiners; the one before it is released when a new one is complete.

    With a `directory`, receivers fetch each bucket as soon as it is put, while the next one is packed. Each
    rank of a trainer may publish its own part: a version is complete with the last of them.

    Threads take turns: a version is complete before the next one begins.

    Args:
        store: Where the buckets go, a store or a transport: Ray's object store unless given.
        bucket_bytes: Size of a bucket, 16 MiB unless given, 128 MiB in memory that a node shares; a larger
            tensor has a bucket of its own.
        directory: Where versions are announced.
        part: Which part this publisher publishes: its rank.
        parts: How many parts a version has.
        sharded: Publish this rank's shards of DTensors, so that no process needs memory for a whole tensor;
            receivers put them together. Other tensors of a model with DTensors are published by part 0.
        keep: How many complete versions stay available; with a directory, that one's `keep` counts.
        window_bytes: With a directory: how many bytes may be put that not all receivers of an update by
            `sync_weights` have fetched; None for no limit (four buckets where they are broadcast).
        timeout_s: With a directory: how long to wait for receivers that lag, and for other ranks.
        checksums: Make a checksum of each bucket; receivers verify what has one.
        dtype: Cast floating-point tensors to this.
        transform: Called with the name and the whole tensor; returns what to publish in its place, one
            tensor or several with names: a quantisation with its scales, for example.
        rename: Name -> name that receivers know; a mapping leaves names that it lacks.
        select: Names to publish, or a predicate; an adapter's, for example.

    Raises:
        ValueError: An option is out of its range, or does not go with another.
        TypeError: `select` is one text, or an iterator.
    """

    def __init__(
        self,
        store: ByteStore | PullTransport | None = None,
        *,
        bucket_bytes: int | None = None,
        directory: WeightDirectory | None = None,
        part: int = 0,
        parts: int = 1,
        sharded: bool = False,
        keep: int = 1,
        window_bytes: int | None = None,
        timeout_s: float | None = 600.0,
        checksums: bool = True,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        rename: Rename | None = None,
        select: Select | None = None,
    ) -> None:
        if bucket_bytes is not None and bucket_bytes < ALIGNMENT:
            raise ValueError(f"bucket_bytes must be at least {ALIGNMENT}, got {bucket_bytes}")
        if not 0 <= part < parts:
            raise ValueError(f"part must be from 0 to {parts - 1}, got {part}")
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}: a directory may keep none")
        if window_bytes is not None and window_bytes < 1:
            raise ValueError(f"window_bytes must be at least 1, got {window_bytes}; None is no limit")
        if sharded and transform is not None:
            raise ValueError("transform= takes whole tensors, and sharded=True has none")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {timeout_s}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype= casts floating-point tensors to another such dtype, not to {dtype}")
        self._store = as_store(store)
        self._asked_bytes, self._bucket_bytes = bucket_bytes, 0
        self._part, self._parts, self._sharded, self._checksums = part, parts, sharded, checksums
        self._selection = Selection(select, dtype, transform, rename)
        self._rooms, self._plans = Rooms(self._store), PlanCache()
        self._name = uuid.uuid4().hex
        self._publishing = False
        self._window_bytes = window_bytes
        self._teller: Teller = (
            LoneTeller(self._name, part, parts)
            if directory is None
            else DirectoryTeller(directory, self._store, self._name, part, parts, timeout_s)
        )
        self._keeping = Keeping(self._store, self._teller, keep)
        super().__init__()
        self._lock = threading.RLock()  # An iterator that calls `publish` is told so.

    @property
    def latest(self) -> WeightUpdate | None:
        """The latest complete version, or this rank's part of it; None with a directory, which keeps it."""
        return self._keeping.latest

    def publish(self, weights: Weights, *, version: int | None = None, partial: bool = False) -> WeightUpdate:
        """Publish a state dict, or an iterator that yields (name, tensor), as one version.

        Tied tensors of a state dict (same memory, dtype, shape and strides) are sent once. A `DTensor` is
        gathered by its `full_tensor()`, a collective: the other ranks drain `gather_weights` meanwhile
        (unless `sharded`).

        Nobody may write to the tensors meanwhile, as a training step in another thread would: a version that
        mixes several states of the model is refused. (What cannot be seen is a writer that stands still, half
        done, during all of it; nor one that torch does not count, as through numpy, and that only exchanges
        words of 64 bits within a tensor.) What receivers had of such a version is given up by them, too.

        All tensors of a mapping or list are held until the end. An iterator may make each one as it is asked
        for it: none is held longer than its copy takes, and at the end those are looked at again whose memory
        somebody else still holds, as a model does. Memory that it fills anew for a later tensor is no part of
        a model: once elements of a storage were given again with other values, that storage may change.
        (A training step between two tied tensors of an iterator looks the same; the other tensors show it.)

        Args:
            weights: The tensors.
            version: At least 1; one more than the last version unless given; with a directory, what it says.
                Where a version has several parts, and no `sync_weights` with a directory asks for it, each
                rank has to give it: parts of several training steps are not joined. What `sync_weights` with
                a directory calls must not.
            partial: These are the only tensors that changed since the version before: receivers that hold it
                keep their others.

        Raises:
            TypeError: `version` is no whole number, or a name no text.
            ValueError: `version` is below 1, does not rise, or has to be given; a name comes twice, there is
                no tensor, or nothing to which a partial version could be added.
            UnsupportedTensorError: A tensor has no plain bytes (quantised, sparse, meta).
            SourceChangedError: Tensors were written to meanwhile; the latest version stays what it was.
            StaleVersionError: Another publisher of this part was made since.
            UpdateAbortedError: A receiver or another rank failed, and the version was given up.
            TransportTimeoutError: Receivers or other ranks lag for longer than `timeout_s`.
            DirectoryLostError: The directory does not answer. As it may have the version when it does, its
                buckets stay until the next call that is answered, or `close`.
            TransportClosedError: The publisher is closed.
            TransportError: The publisher is another process's, or is publishing in this thread already.
        """
        version = None if version is None else _numbered(version)
        with self._turn():
            self._bucket_bytes = self._asked_bytes or bucket_bytes_for(self._store)
            taking = Taking(weights, self._selection, sharded=self._sharded, first_part=self._part == 0)
            specs = taking.specs()
            plan = None if specs is None else self._plans.plan(specs, taking.ties, self._bucket_bytes)
            names = self._changed_names(plan) if partial else None
            number = self._teller.begin(version, plan, names)
            buckets = self._keeping.begin(number)
            broadcasts = False
            try:
                broadcasts = self._begin_broadcast(number)
                update = self._pack(taking, number, plan, buckets, self._window(broadcasts))
            except BaseException as error:
                if broadcasts:
                    abandon(self._store)
                with suppress(DirectoryLostError):  # What it does not know yet is asked again.
                    self._keeping.give_up(f"its publisher raised {error!r}")
                raise
            self._keeping.complete(update)
            return update

    def _begin_broadcast(self, number: int) -> bool:
        """Tell the store that a version begins; whether it sends that to receivers who wait for it."""
        return isinstance(self._store, BroadcastStore) and self._store.begin(*self._teller.route(number))

    def _window(self, broadcasts: bool) -> int | None:
        if self._window_bytes is None and broadcasts:
            return _BROADCAST_BUCKETS * self._bucket_bytes
        return self._window_bytes

    def _changed_names(self, plan: BucketPlan | None) -> frozenset[str]:
        if plan is None:
            raise ValueError("a partial update needs a mapping or a list of tensors, and no transform=")
        return frozenset(plan.schema)

    def _pack(
        self,
        taking: Taking,
        number: int,
        plan: BucketPlan | None,
        buckets: list[Bucket],
        window_bytes: int | None,
    ) -> WeightUpdate:
        watch, placer = Stopwatch(), Placer(self._bucket_bytes)

        def send(full: Full) -> None:
            self._teller.make_room(number, full.size_bytes, window_bytes)
            with watch.measure("put"):
                summed = full.summed
                if self._checksums and summed is None:
                    summed = checksum(full.room.memory[: full.size_bytes])
                buckets.append(Bucket(self._rooms.put(full.room, full.size_bytes), full.size_bytes, summed))
                full.room.is_put = True
            entries = None if plan else tuple(full.entries)
            announced = Announced(self._part, full.index, buckets[-1], entries)
            self._teller.announce(number, announced, is_only=full.is_last and not full.index)

        sizes = None if plan is None else plan.bucket_sizes
        overlap = self._teller.streams and (sizes is None or len(sizes) > 1)
        packer = Packer(
            placer,
            self._rooms,
            send,
            self._bucket_bytes,
            sizes=sizes,
            checksums=self._checksums,
            overlap=overlap,
        )
        self._keeping.add_until(packer.close)
        with watch.measure("gather"):
            packer.add_all(taking)
            packer.finish()
        if not placer.entries and self._parts == 1:
            raise ValueError("there is no tensor to publish")
        counts_later = self._teller.counts_later
        if not counts_later:
            taking.check()  # While the last bucket is sent.
        with watch.measure("gather"):
            packer.await_sent()
        packer.close()
        update = self._teller.finish(number, plan or placer.plan(), buckets, watch, packer.waited_s)
        if counts_later:
            taking.check(leaves_half=True)  # While receivers load it.
        return update

    def release(self) -> None:
        """Give up the versions that are kept; receivers that already fetch from Ray's store can finish.

        In a forked child it does nothing, nor does `close`: they are the parent's.
        """
        if self._is_parents:
            return
        with self._lock:
            self._keeping.release()

    def close(self) -> None:
        """Release everything, after a publication that is going on; idempotent.

        Raises:
            TransportError: The iterator that is published called this.
        """
        if self._is_parents:
            return
        with self._lock:
            if self._closed:
                return
            self._check_idle()
            with suppress(DirectoryLostError):
                self._keeping.give_up("its publisher was closed")
            self._keeping.forget()
            self._keeping.release()
            self._rooms.clear()
            self._teller.close()
            self._closed = True

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until nobody else publishes: there is one next version."""
        self._check_process()
        with self._lock:
            if self._closed:
                raise TransportClosedError("this WeightPublisher is closed")
            self._check_idle()
            try:
                self._publishing = True
                self._rooms.give_left()
                self._keeping.give_up("its publisher was interrupted")
                yield
            finally:
                self._publishing = False

    def _check_idle(self) -> None:
        """Refuse, with the lock held, what this thread asks for while it publishes."""
        if self._publishing:
            raise TransportError("publisher was called by the iterator that it takes its weights from")


def _numbered(version: SupportsIndex) -> int:
    """A version's number, as rows are tagged with it."""
    if isinstance(version, bool):
        raise TypeError(f"version is a whole number, not {version!r}")
    number = operator.index(version)
    if number < 1:
        raise ValueError(f"versions begin at 1, got {number}: give step + 1 where steps begin at 0")
    if number > _LAST_VERSION:
        raise ValueError(f"versions end at {_LAST_VERSION}, got {number}")
    return number
