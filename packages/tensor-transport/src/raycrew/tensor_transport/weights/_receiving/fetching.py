"""Buckets of a version, one after another, fetched while those before are loaded."""

import dataclasses
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch

from raycrew.tensor_transport._bytes import copy_elements, private_copy
from raycrew.tensor_transport.errors import (
    BucketFetchError,
    ChecksumMismatchError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
    UpdateAbortedError,
    WeightUpdateError,
)
from raycrew.tensor_transport.protocols import ByteStore
from raycrew.tensor_transport.weights._update import (
    Bucket,
    Schema,
    Stopwatch,
    TensorEntry,
    checksum,
    get_tensor,
    settle,
    shares_memory,
    use_here,
)

_Error = TypeVar("_Error", BucketFetchError, ChecksumMismatchError)


@dataclass(frozen=True, slots=True)
class Heading:
    """What is known of a version before its buckets.

    Attributes:
        entries: Those of each part, whose buckets are counted by themselves; None where they come with the
            buckets, until all are there.
        is_numbered_once: Whether the receiver's directory numbered it: it uses no number again.
    """

    version: int
    publisher: str
    bases: frozenset[int] | None
    entries: Sequence[Sequence[TensorEntry]] | None
    schema: Schema | None
    is_vote: bool = False
    is_numbered_once: bool = False

    def with_all(self, fetched: "Sequence[Fetched]") -> "Heading":
        """What is known once all buckets are there."""
        if self.entries is not None:
            return self
        entries = [one.parcel.entries for one in fetched]
        schema = {entry.name: (entry.dtype, entry.full_shape) for found in entries for entry in found}
        return dataclasses.replace(self, entries=entries, schema=schema)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A bucket that can be fetched; `of` says which of how many, as far as is known."""

    index: int
    of: str
    bucket: Bucket
    entries: Sequence[TensorEntry]


class Feed(Protocol):
    """Tells what a version has."""

    def heading(self, timeout_s: float | None) -> Heading:
        """What is known before a byte moves; both sides' digests have been compared."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether `next` is known to give no more buckets: then it waits for nothing."""
        ...

    @property
    def is_at_hand(self) -> bool:
        """Whether `next` is known to wait for nothing."""
        ...

    def next(self, timeout_s: float | None, *, is_patient: bool = False) -> Parcel | None:
        """The next bucket, None after the last one; who is patient has no use for it before all are there."""
        ...

    def check(self) -> None:
        """Raise UpdateAbortedError if the version was given up: that explains why a bucket is gone."""
        ...

    def stop(self) -> None:
        """Nobody wants more: whoever waits in `next` need not."""
        ...


@dataclass(frozen=True)
class Fetched:
    """A bucket at hand (uint8, 1-D); kept for a rollback, it is verified again when it is used again."""

    parcel: Parcel
    data: torch.Tensor

    def tensors(self) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Its tensors and pieces of tensors, in place."""
        use_here(self.data)
        for entry in self.parcel.entries:
            yield entry, entry.view(self.data)

    def verify(self, version: int) -> None:
        """Compare it with its checksum.

        Raises:
            ChecksumMismatchError: These are not the bytes that were published.
        """
        bucket = self.parcel.bucket
        if self.data.numel() != bucket.size_bytes:
            what = f"{self.data.numel()} bytes in place of {bucket.size_bytes}"
        elif bucket.checksum is not None and checksum(self.data) != bucket.checksum:
            what = "its checksum differs"
        else:
            return
        said = f"update {version}: bucket {self.parcel.index} arrived damaged: {what}"
        raise _of_bucket(ChecksumMismatchError(said), self.parcel)


def _of_bucket(error: _Error, parcel: Parcel) -> _Error:
    """The error, which says which bucket it is: a frame that had it would hold it, and be held by it."""
    error.bucket = parcel.index
    return error


class Fetcher:
    """Gets buckets out of a store.

    Args:
        store: Where they are.
        borrow: Hand out the store's own memory.
        verify: Compare checksums.

    """

    def __init__(self, store: ByteStore, *, borrow: bool, verify: bool) -> None:
        self._store = store
        self._borrow = borrow
        self._verify = self._sums = verify

    @property
    def takes_no_time(self) -> bool:
        """Whether a bucket like the last one is neither copied nor looked at: no thread is worth it."""
        return self._borrow and not self._sums and shares_memory(self._store)

    def fetch(self, version: int, parcel: Parcel, timeout_s: float | None) -> Fetched:
        """One bucket, verified.

        Raises:
            BucketFetchError: It is lost, or did not arrive in time.
            ChecksumMismatchError: It arrived damaged.
        """
        try:
            if parcel.bucket.ticket is None:
                raise TransportError("all receivers had it, and it is not kept")
            data = get_tensor(self._store, parcel.bucket.ticket, timeout_s)
        except PeerLostError as error:
            raise UpdateAbortedError(f"version {version} was given up: {error}") from error
        except TransportError as error:
            what = f"update {version}: bucket {parcel.index} of {parcel.of} cannot be had: {error}"
            raise _of_bucket(BucketFetchError(what), parcel) from error
        keeps = self._borrow or bool(getattr(self._store, "gives_own_memory", False))
        found = Fetched(parcel, data if keeps else private_copy(data))
        if self._verify or data.numel() != parcel.bucket.size_bytes:
            found.verify(version)
        self._sums = self._verify and parcel.bucket.checksum is not None
        settle(data.device)
        return found


class Stream:
    """One pass over a version's buckets.

    Args:
        feed: Tells what there is.
        version: Which one.
        fetcher: Gets it.
        watch: Measures how long it is waited for.
        deadline: Of all of it.
        whole: Whether no bucket is used before all are there.
        eager: Whether all are fetched as soon as may be, however long each one is used.
    """

    def __init__(
        self,
        feed: Feed,
        version: int,
        fetcher: Fetcher,
        watch: Stopwatch,
        deadline: float | None,
        *,
        whole: bool = False,
        eager: bool = False,
    ) -> None:
        self.size_bytes = 0
        self._whole, self._eager = whole, eager
        self._feed, self._version, self._fetcher = feed, version, fetcher
        self._watch = watch
        self._deadline = deadline

    def __iter__(self) -> Generator[Fetched, None, None]:
        """The buckets; the next one is fetched while the current one is used, unless that takes no time."""
        pool: ThreadPoolExecutor | None = None
        pending: Future[Any] | None = None
        try:
            found = self._awaited()
            while found is not None:
                self.size_bytes += found.data.numel()
                if self._feed.is_over:
                    self._next()  # Says that all of it was had, before it is loaded.
                    yield found
                    return
                if self._fetcher.takes_no_time and self._feed.is_at_hand and not self._eager:
                    yield found
                    found = self._awaited()
                    continue
                pool = pool or ThreadPoolExecutor(1, thread_name_prefix="weight-fetch")
                if self._eager:
                    coming: SimpleQueue[Fetched | None] = SimpleQueue()
                    pending = pool.submit(self._fetch_all, coming)
                    yield found
                    while (found := coming.get()) is not None:
                        self.size_bytes += found.data.numel()
                        yield found
                    pending.result()
                    return
                pending = pool.submit(self._next)
                yield found
                with self._watch.measure("wire"):
                    found = pending.result()
        finally:
            self._feed.stop()
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
            pending = None  # It and what it raised would hold each other, and buckets.

    def _fetch_all(self, coming: "SimpleQueue[Fetched | None]") -> None:
        """What a thread does: hand on what it fetches, and None when there is no more, or it failed."""
        try:
            while (found := self._awaited()) is not None:
                coming.put(found)
        finally:
            coming.put(None)

    def _awaited(self) -> Fetched | None:
        with self._watch.measure("wire"):
            return self._next()

    def _next(self) -> Fetched | None:
        try:
            is_patient = self._whole and self._fetcher.takes_no_time
            parcel = self._feed.next(self._left(), is_patient=is_patient)
        except TransportTimeoutError as error:
            raise BucketFetchError(f"update {self._version}: its publisher lags: {error}") from error
        if parcel is None:
            return None
        try:
            return self._fetcher.fetch(self._version, parcel, self._left())
        except BucketFetchError:
            self._feed.check()
            raise

    def _left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())


class Assembler:
    """Hands out whole tensors: those that come in pieces once all pieces are there."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._open: dict[str, tuple[torch.Tensor, int]] = {}

    def whole(self, parts: Iterable[tuple[TensorEntry, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of each tensor that is complete."""
        for entry, tensor in parts:
            if not entry.is_piece:
                yield entry.name, tensor
                continue
            target, missing = self._open.get(entry.name) or self._begin(entry, tensor.device)
            where = tuple(slice(a, a + n) for a, n in zip(entry.start, entry.shape, strict=True))
            copy_elements(target[where], tensor)
            missing -= tensor.numel()
            if missing:
                self._open[entry.name] = (target, missing)
                continue
            self._open.pop(entry.name, None)
            yield entry.name, target

    def check_empty(self) -> None:
        """Raise WeightUpdateError if a tensor lacks pieces."""
        if self._open:
            names = sorted(self._open)
            raise WeightUpdateError(f"update {self._version}: pieces of {names[:5]} are missing")

    @staticmethod
    def _begin(entry: TensorEntry, device: torch.device) -> tuple[torch.Tensor, int]:
        target = torch.empty(entry.whole, dtype=getattr(torch, entry.dtype), device=device)
        return target, target.numel()


def without(parcel: Parcel, names: frozenset[str]) -> Parcel:
    """The parcel with the entries of these names alone."""
    return dataclasses.replace(parcel, entries=[e for e in parcel.entries if e.name in names])
