"""The generator's side: check an update, fetch it bucket by bucket, load it, say which version is held."""

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from raycrew.tensor_transport._ray_compat import RayByteStore
from raycrew.tensor_transport.errors import (
    BucketFetchError,
    ChecksumMismatchError,
    StaleVersionError,
    TransportError,
    WeightUpdateError,
)
from raycrew.tensor_transport.protocols import Bytes, ByteStore
from raycrew.tensor_transport.weights._manifest import (
    Schema,
    TensorEntry,
    WeightUpdate,
    checksum,
    compare_schemas,
    schema_of,
)

Load = Callable[[Iterator[tuple[str, torch.Tensor]]], Any]


@dataclass(frozen=True, slots=True)
class WeightReceipt:
    """What one receiver says after an update.

    Attributes:
        version: The version that it now holds.
        size_bytes: Bytes fetched; 0 where the version was held already.
        wire_s: Seconds in which loading waited for bytes (fetching and checksums).
        load_s: Seconds spent in the `load` callable itself.
        previous_version: What it held before, None for the first.
    """

    version: int
    size_bytes: int
    wire_s: float
    load_s: float
    previous_version: int | None = None


class WeightReceiver:
    """Applies published updates to whatever `load` loads into.

    An update is a transaction: its names, shapes and dtypes are compared before a byte moves, every
    bucket is fetched (the next one while the current one loads) and its checksum verified before its
    tensors are handed to `load`, and `version` changes only after all of them were loaded. After a
    failure the previous version goes on being reported; `intact` tells whether the weights are still
    its own, or a mixture because loading had begun. Applying the same or any later update repairs that.

    Args:
        load: Called with an iterator of (name, tensor) on the CPU, which it has to exhaust. It may keep the
            tensors; it must not write to them where `borrow` is set.
        expected: The names, shapes and dtypes to accept: a state dict (meta tensors will do). Without it, the
            first update that commits sets them.
        store: Where the buckets are: Ray's object store unless given.
        borrow: Hand out tensors over the store's memory itself instead of a copy.
        verify_first: Fetch and verify all buckets before `load` is called, so that a lost or damaged bucket
            never leaves a mixture; needs memory for the whole update unless `borrow` is set.
    """

    def __init__(
        self,
        load: Load,
        *,
        expected: Mapping[str, torch.Tensor] | None = None,
        store: ByteStore | None = None,
        borrow: bool = False,
        verify_first: bool = False,
    ) -> None:
        self._load = load
        self._expected: Schema | None = None if expected is None else schema_of(expected)
        self._store = store if store is not None else RayByteStore()
        self._borrow = borrow
        self._verify_first = verify_first
        self._lock = threading.Lock()
        self._version: int | None = None
        self._publisher: str | None = None
        self._superseded: set[str] = set()
        self._intact = True

    @property
    def version(self) -> int | None:
        """The version of the last update that was applied whole, None before the first."""
        return self._version

    @property
    def intact(self) -> bool:
        """Whether the weights are those of `version`; False after an update that failed while loading."""
        return self._intact

    def apply(self, update: WeightUpdate, *, timeout_s: float | None = 600.0) -> WeightReceipt:
        """Fetch, verify and load one update; holding it already is a success that moves nothing.

        Raises:
            StaleVersionError: A later version is held, or the update is from a publisher that was replaced.
            ManifestMismatchError: Names, shapes or dtypes differ from what this receiver holds.
            BucketFetchError: A bucket is lost, or did not arrive in time.
            ChecksumMismatchError: A bucket arrived damaged.
            WeightUpdateError: `load` raised, or did not take every tensor.
        """
        with self._lock:
            try:
                return self._apply(update, timeout_s)
            except WeightUpdateError as error:
                error.version, error.current_version, error.intact = (
                    update.version,
                    self._version,
                    self._intact,
                )
                error.add_note(self._standing())
                raise

    def _apply(self, update: WeightUpdate, timeout_s: float | None) -> WeightReceipt:
        previous = self._version
        same = update.publisher == self._publisher
        if same and update.version == previous and self._intact:
            return WeightReceipt(update.version, 0, 0.0, 0.0, previous)
        if same and previous is not None and update.version < previous:
            raise StaleVersionError(f"update {update.version} is stale: version {previous} is held already")
        if update.publisher in self._superseded:
            raise StaleVersionError(
                f"update {update.version} is stale: its publisher {update.publisher:.8} was replaced by "
                f"{self._publisher:.8}, whose version {previous} was applied; only a publisher that is not "
                "replaced may go on"
            )
        if self._expected is not None:
            compare_schemas(self._expected, update)
        wire_s, load_s = self._load_all(update, timeout_s)
        if self._expected is None:
            self._expected = update.schema
        if self._publisher is not None and not same:
            self._superseded.add(self._publisher)
        self._publisher, self._version, self._intact = update.publisher, update.version, True
        return WeightReceipt(update.version, update.size_bytes, wire_s, load_s, previous)

    def _load_all(self, update: WeightUpdate, timeout_s: float | None) -> tuple[float, float]:
        start = time.perf_counter()
        stream = _Stream(update, self._fetch, timeout_s)
        with ThreadPoolExecutor(1, thread_name_prefix="weight-fetch") as pool:
            buckets = stream.buckets(pool)
            if self._verify_first:
                buckets = iter(list(buckets))
            tensors = stream.tensors(buckets, self._touched)
            try:
                self._load(tensors)
            except Exception as error:
                if stream.failure is not None:
                    raise stream.failure from error
                raise WeightUpdateError(f"update {update.version}: load() raised {error!r}") from error
        if stream.failure is not None:
            raise stream.failure
        if stream.taken != len(update.tensors):
            raise WeightUpdateError(
                f"update {update.version}: load() took {stream.taken} of {len(update.tensors)} tensors; "
                "it has to exhaust its iterator"
            )
        return stream.waited_s, time.perf_counter() - start - stream.waited_s

    def _touched(self) -> None:
        self._intact = False

    def _fetch(self, update: WeightUpdate, index: int, timeout_s: float | None) -> torch.Tensor:
        bucket = update.buckets[index]
        try:
            data = self._store.get(bucket.ticket, timeout_s)
        except TransportError as error:
            failure = BucketFetchError(
                f"update {update.version}: bucket {index} of {len(update.buckets)} cannot be had: {error}"
            )
            failure.bucket = index
            raise failure from error
        if not self._borrow:
            data = data.copy()
        _verify(update, index, data)
        return _as_tensor(data)

    def _standing(self) -> str:
        held = "no version" if self._version is None else f"version {self._version}"
        if self._intact:
            return f"the receiver still holds and reports {held}"
        return f"the receiver still reports {held}, but its weights are a mixture: apply an update again"


class _Stream:
    """One pass over an update's buckets: what was taken, how long it waited, what went wrong."""

    def __init__(
        self,
        update: WeightUpdate,
        fetch: Callable[[WeightUpdate, int, float | None], torch.Tensor],
        timeout_s: float | None,
    ) -> None:
        self.waited_s = 0.0
        self.taken = 0
        self.failure: Exception | None = None
        self._update = update
        self._fetch = fetch
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def buckets(self, pool: ThreadPoolExecutor) -> Iterator[torch.Tensor]:
        """The buckets in order; the next one is fetched while the current one is used."""
        pending = self._submit(pool, 0)
        for index in range(1, len(self._update.buckets) + 1):
            start = time.perf_counter()
            try:
                bucket = pending.result()
            except Exception as error:
                self.failure = error
                raise
            finally:
                self.waited_s += time.perf_counter() - start
            if index < len(self._update.buckets):
                pending = self._submit(pool, index)
            yield bucket

    def tensors(
        self, buckets: Iterator[torch.Tensor], touched: Callable[[], None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) for each entry, bucket by bucket; calls `touched` before the first leaves."""
        by_bucket: dict[int, list[TensorEntry]] = {}
        for entry in self._update.tensors:
            by_bucket.setdefault(entry.bucket, []).append(entry)
        for index, bucket in enumerate(buckets):
            for entry in by_bucket[index]:
                touched()
                self.taken += 1
                yield entry.name, entry.view(bucket)

    def _submit(self, pool: ThreadPoolExecutor, index: int) -> Future[torch.Tensor]:
        return pool.submit(self._fetch_in_time, index)

    def _fetch_in_time(self, index: int) -> torch.Tensor:
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        return self._fetch(self._update, index, left)


def _verify(update: WeightUpdate, index: int, data: Bytes) -> None:
    bucket = update.buckets[index]
    found = checksum(data) if data.size == bucket.size_bytes else None
    if found == bucket.checksum:
        return
    what = f"{data.size} bytes in place of {bucket.size_bytes}" if found is None else "its checksum differs"
    failure = ChecksumMismatchError(f"update {update.version}: bucket {index} arrived damaged: {what}")
    failure.bucket = index
    raise failure


def _as_tensor(data: Bytes) -> torch.Tensor:
    """`data` as a tensor over the same memory, also where it is read-only."""
    if data.flags.writeable:
        return torch.from_numpy(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(data)
