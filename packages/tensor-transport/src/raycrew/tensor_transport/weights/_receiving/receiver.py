"""The generator's side: check a version, fetch it bucket by bucket, load it, say which version is held."""

import contextlib
import dataclasses
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from raycrew.tensor_transport._ray_compat import where
from raycrew.tensor_transport.errors import (
    BaseVersionError,
    BucketFetchError,
    DirectoryLostError,
    StaleVersionError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
    UpdateAbortedError,
    WeightUpdateError,
)
from raycrew.tensor_transport.protocols import ByteStore
from raycrew.tensor_transport.transports import PullTransport
from raycrew.tensor_transport.weights._directory import Record, WeightDirectory, release
from raycrew.tensor_transport.weights._receiving.feeds import DirectoryFeed, PlanMemory, UpdateFeed
from raycrew.tensor_transport.weights._receiving.fetching import Feed, Fetched, Fetcher, Heading, Stream
from raycrew.tensor_transport.weights._receiving.held import Held
from raycrew.tensor_transport.weights._receiving.loading import Load, Loading, load_whole
from raycrew.tensor_transport.weights._receiving.receipt import WeightReceipt
from raycrew.tensor_transport.weights._receiving.rollback import (
    NoRollback,
    RefetchRollback,
    Rollback,
    RollbackKind,
    ShadowRollback,
)
from raycrew.tensor_transport.weights._update import (
    Schema,
    Stopwatch,
    WeightUpdate,
    as_store,
    check_cover,
    compare_schemas,
    release_scope,
    schema_of,
)

_RETURN_S = 60.0
"""A rollback has at least so long to fetch what it returns to: the update's own time may be over."""


@dataclass(frozen=True)
class _Prepared:
    """A version that is fetched, and not loaded."""

    heading: Heading
    fetched: list[Fetched]
    watch: Stopwatch


class WeightReceiver:
    """Applies published versions to whatever `load` loads into.

    An update is a transaction: its names, shapes and dtypes are compared before a byte moves, every
    bucket is fetched (the next one while the current one loads) and its checksum verified before its
    tensors are handed to `load`, and `version` changes only after all of them were loaded. After a
    failure the previous version goes on being reported; `intact` tells whether the weights are still
    its own, or a mixture because loading had begun. Applying the same or any later update repairs that.

    With a `directory` it hears of versions by their number: `prepare(version)` fetches while the version is
    still being published, `apply(version)` loads it, and `pull()` brings a late or restarted receiver to the
    latest one. A version that `sync_weights` began is kept only if all receivers loaded it; else each returns
    to what it had, which takes a `rollback`.

    Args:
        load: Called with an iterator of (name, tensor) on the CPU, which it has to exhaust. It may keep the
            tensors; it must not write to them where `borrow` is set, or for a "shadow".
        expected: The names, shapes and dtypes to accept: a state dict (meta tensors will do). Without it, the
            first update that commits sets them.
        store: Where the buckets are, a store or a transport: Ray's object store unless given.
        borrow: Hand out tensors over the store's memory itself instead of a copy.
        verify_first: Fetch and verify all buckets before `load` is called, so that a lost or damaged bucket
            never leaves a mixture; needs memory for the whole update unless `borrow` is set.
        verify: Compare the checksums of buckets; where publisher and receiver share a node's memory, they
            can be spared.
        rollback: How to return to the version before when `load` fails half-way, by calling it once more.
            "shadow": the buckets of what is loaded are kept, which takes the memory of one model, two during
            an update, and no time. "refetch": they are fetched again, which takes no memory, and the store
            has to keep that version. "none": the weights are a mixture until an update is applied.
        deltas: The `DeltaTarget` whose `load` is called: updates say what changed since the one before, in
            bytes of another size each time. It knows by itself what fits, and the way back.
        directory: Where versions are found by number.
        name: What the directory calls this receiver; unique.

    Raises:
        ValueError: There is no such rollback.
    """

    def __init__(
        self,
        load: Load,
        *,
        expected: Mapping[str, torch.Tensor] | None = None,
        store: ByteStore | PullTransport | None = None,
        borrow: bool = False,
        verify_first: bool = False,
        verify: bool = True,
        rollback: RollbackKind = "none",
        deltas: Rollback | None = None,
        directory: WeightDirectory | None = None,
        name: str | None = None,
    ) -> None:
        kinds: dict[str, Callable[[], Rollback]] = {
            "none": NoRollback,
            "shadow": ShadowRollback,
            "refetch": lambda: RefetchRollback(self._refetch),
        }
        if rollback not in kinds:
            raise ValueError(f"rollback must be one of {sorted(kinds)}, got {rollback!r}")
        if deltas is not None and (expected is not None or rollback != "none"):
            raise ValueError("deltas= goes without expected= and rollback=: the DeltaTarget does both")
        self._load = load
        self._expected: Schema | None = None if expected is None else schema_of(expected)
        self._store = as_store(store)
        self._fetcher = Fetcher(self._store, borrow=borrow, verify=verify)
        self._verify_first = verify_first
        self._rollback: Rollback = kinds[rollback]() if deltas is None else deltas
        self._fixed = deltas is None
        self._refetches = rollback == "refetch"
        self._directory = directory
        self._name = name or uuid.uuid4().hex[:12]
        self._memory = PlanMemory()
        self._lock = threading.Lock()
        self._held = Held()
        self._return_s: float | None = _RETURN_S
        self._superseded: set[str] = set()
        self._updates: dict[int, WeightUpdate] = {}
        self._prepared: _Prepared | None = None
        self._closed = False
        self._pid = os.getpid()

    @property
    def name(self) -> str:
        """What the directory calls this receiver."""
        return self._name

    @property
    def version(self) -> int | None:
        """The version of the last update that was applied whole, None before the first.

        While another one is loaded, and until it is decided, `intact` is False.
        """
        return self._held.version

    @property
    def intact(self) -> bool:
        """Whether the weights are those of `version`.

        False from the first tensor that `load` is given to the end of the update, as other threads see it,
        and after one that failed while loading.
        """
        return self._held.intact

    def tag(self, rows: int) -> torch.Tensor:
        """The version for each of so many rows that were made with these weights: int64, [rows].

        A thread that makes rows while another one applies updates has to ask before and after, and to drop
        the rows where it is refused once, or the answers differ.

        Raises:
            WeightUpdateError: No version is held, the weights are a mixture, or another version is loaded or
                not decided yet.
        """
        held = self._held
        if held.version is None or not held.intact:
            raise WeightUpdateError(held.standing(), current_version=held.version, intact=held.intact)
        return torch.full((rows,), held.version, dtype=torch.int64)

    def apply(self, update: WeightUpdate | int, *, timeout_s: float | None = 600.0) -> WeightReceipt:
        """Fetch, verify and load one update; holding it already is a success that moves nothing.

        A version that is given by its number, and that `sync_weights` began, is decided by the directory:
        this returns when all receivers have loaded it, and else rolls back and raises.

        Args:
            update: A complete update, or the number of a version in the directory.
            timeout_s: Deadline of all of it; a rollback that has to fetch has as long again, or a minute.

        Raises:
            StaleVersionError: A later version is held, or the update is from a publisher that was replaced.
            ManifestMismatchError: Names, shapes or dtypes differ from what this receiver holds.
            BaseVersionError: A partial update, to be added to another version than is held.
            BucketFetchError: A bucket is lost, or did not arrive in time.
            ChecksumMismatchError: A bucket arrived damaged.
            UpdateAbortedError: The version was given up, by a publisher or by another receiver.
            DirectoryLostError: The directory does not answer.
            WeightUpdateError: `load` raised, or did not take every tensor.
            TransportClosedError: The receiver is closed.
        """
        with self._transaction(update if isinstance(update, int) else update.version):
            return self._apply(update, timeout_s)

    def prepare(self, version: int, *, timeout_s: float | None = 600.0) -> WeightReceipt:
        """Fetch and verify a version while it is being published; `apply(version)` then only loads it.

        The weights are not touched, so generation may go on. It takes memory for the whole update, unless the
        store's own memory is borrowed or mapped.

        Raises:
            WeightUpdateError: As `apply`.
        """
        with self._transaction(version):
            self._prepared = None
            try:
                heading, stream, watch = self._begin(version, timeout_s)
                self._check(heading)
                self._prepared = _Prepared(heading, list(stream), watch)
            except Exception as error:
                self._refuse(version, error)
                raise
            return WeightReceipt(
                int(version), stream.size_bytes, watch.total("wire"), 0.0, self.version, watch.spans
            )

    def pull(self, version: int | None = None, *, timeout_s: float | None = 600.0) -> WeightReceipt:
        """Come to a version of the directory, the latest unless given, with all those it has to be added to.

        For receivers that are late or were restarted. What is replaced by a later version while it is fetched
        is tried again with that one.

        Raises:
            BucketFetchError: There is no version, or it is not kept.
            WeightUpdateError: As `apply`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._check_usable()
        while True:
            held = self._held.version if self._held.intact else None
            chain = self._need_directory().ask(Record.chain, version, held)
            try:
                return self._pull(chain, deadline)
            except BucketFetchError:
                latest = self._need_directory().latest
                if version is not None or latest is None or latest == chain[-1]:
                    raise

    def close(self) -> None:
        """Leave the directory, and give up what is kept for a rollback; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._prepared, self._rollback, self._updates = None, NoRollback(), {}
            if self._directory is not None:
                with contextlib.suppress(DirectoryLostError):
                    self._directory.ask(Record.leave, self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _transaction(self, version: int) -> Iterator[None]:
        """One update at a time; its errors say what is held afterwards."""
        self._check_usable()
        with self._lock:
            self._check_usable()
            try:
                yield
            except WeightUpdateError as error:
                held = self._held
                error.version, error.current_version, error.intact = int(version), held.version, held.intact
                error.add_note(held.standing())
                raise

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise TransportError(
                f"this WeightReceiver is that of process {self._pid}; after a fork, make another one"
            )
        if self._closed:
            raise TransportClosedError("this WeightReceiver is closed")

    def _pull(self, chain: list[int], deadline: float | None) -> WeightReceipt:
        receipt = WeightReceipt(self.version or 0, 0, 0.0, 0.0, self.version)
        for number in chain:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            receipt = self.apply(number, timeout_s=left)
        return receipt

    def _apply(self, update: WeightUpdate | int, timeout_s: float | None) -> WeightReceipt:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._return_s = None if timeout_s is None else max(timeout_s, _RETURN_S)
        prepared, self._prepared = self._prepared, None
        ready = prepared is not None and prepared.heading.version == update
        try:
            stream: Iterable[Fetched]
            if ready and prepared is not None:
                self._feed(update).heading(timeout_s)  # Unless it was given up.
                heading, stream, watch = prepared.heading, prepared.fetched, prepared.watch
            else:
                heading, stream, watch = self._begin(update, timeout_s)
            waited_s = watch.total("wire")
            if self._holds(heading):
                return WeightReceipt(heading.version, 0, 0.0, 0.0, self.version)
            self._check(heading)
            loading = self._load_all(heading, stream, watch)
        except Exception as error:
            self._refuse(update, error)
            raise
        self._settle(heading, loading, deadline)
        return self._commit(update, heading, loading, watch, waited_s)

    def _begin(
        self, update: WeightUpdate | int, timeout_s: float | None
    ) -> tuple[Heading, Stream, Stopwatch]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        watch = Stopwatch()
        feed = self._feed(update)
        try:
            heading = feed.heading(timeout_s)
        except TransportTimeoutError as error:
            raise UpdateAbortedError(f"version {update} was not begun in time: {error}") from error
        return heading, Stream(feed, heading.version, self._fetcher, watch, deadline), watch

    def _feed(self, update: WeightUpdate | int) -> Feed:
        if isinstance(update, WeightUpdate):
            return UpdateFeed(update)
        return DirectoryFeed(self._need_directory(), update, self._name, where(), self._memory)

    def _need_directory(self) -> WeightDirectory:
        if self._directory is None:
            raise ValueError("versions are found by their number in a directory: WeightReceiver(directory=…)")
        return self._directory

    def _holds(self, heading: Heading) -> bool:
        held = self._held
        same = heading.publisher == held.publisher and heading.version == held.version
        return same and held.intact

    def _check(self, heading: Heading) -> None:
        """Refuse, before a byte moves, what does not fit."""
        version, held = heading.version, self._held
        previous, same = held.version, heading.publisher == held.publisher
        if same and previous is not None and version < previous:
            raise StaleVersionError(f"update {version} is stale: version {previous} is held already")
        if heading.publisher in self._superseded:
            raise StaleVersionError(
                f"update {version} is stale: its publisher {heading.publisher:.8} was replaced by "
                f"{held.publisher:.8}, whose version {previous} was applied; only a publisher that is not "
                "replaced may go on"
            )
        if heading.bases is not None and (previous not in heading.bases or not held.intact):
            error = BaseVersionError(
                f"update {version} has to be added to one of the versions {sorted(heading.bases)}: apply one "
                "of them first, or pull()"
            )
            error.bases = tuple(sorted(heading.bases))
            raise error
        if heading.entries is not None:
            check_cover(heading.entries, version)
        if self._expected is not None and heading.schema is not None:
            compare_schemas(self._expected, heading.schema, version, partial=heading.bases is not None)

    def _load_all(self, heading: Heading, stream: Iterable[Fetched], watch: Stopwatch) -> Loading:
        loading = Loading(
            heading, self._expected, keep=self._rollback.keeps_buckets, on_touch=self._let_go_of_held
        )
        if self._verify_first:
            stream = list(stream)
        try:
            load_whole(self._load, loading, stream, watch)
        except BaseException as error:
            if isinstance(error, Exception):
                self._roll_back(loading, error)
            raise
        return loading

    def _settle(self, heading: Heading, loading: Loading, deadline: float | None) -> None:
        """Hear whether the version counts; if not, return to what was held."""
        if not heading.is_vote:
            return
        try:
            self._hear(heading.version, deadline)
        except BaseException as error:
            if isinstance(error, Exception):
                self._roll_back(loading, error)
            raise

    def _hear(self, version: int, deadline: float | None) -> None:
        """Vote for a version, and wait for what the directory decides.

        Raises:
            UpdateAbortedError: It was given up.
            DirectoryLostError: Nobody knows.
        """
        directory = self._need_directory()
        directory.ask(Record.vote, version, self._name, True, "")
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            decision = directory.wait(Record.decision, left, version)
        except TransportTimeoutError:
            late = f"receiver {self._name} waited long enough"
            decision = "aborted" if directory.ask(Record.abort, version, late) else "committed"
        if decision != "committed":
            reason = directory.ask(Record.reason, version)
            raise UpdateAbortedError(f"version {version} was given up: {reason}")

    def _commit(
        self,
        update: WeightUpdate | int,
        heading: Heading,
        loading: Loading,
        watch: Stopwatch,
        waited_s: float,
    ) -> WeightReceipt:
        previous = self._held
        if self._expected is None and self._fixed:
            self._expected = loading.schema
        if previous.publisher is not None and heading.publisher != previous.publisher:
            self._superseded.add(previous.publisher)
        self._held = Held(heading.version, heading.publisher)
        self._rollback.committed(heading.version, loading.fetched)
        if isinstance(update, WeightUpdate):
            self._keep_update(update)
        elif self._directory is not None:
            with contextlib.suppress(DirectoryLostError):
                self._directory.ask(Record.hold, self._name, heading.version)
                release(self._directory, self._store, release_scope(self._store, ""))
        return WeightReceipt(
            heading.version,
            loading.size_bytes,
            watch.total("wire"),
            max(0.0, watch.total("load") - (watch.total("wire") - waited_s)),
            previous.version,
            watch.spans,
        )

    def _keep_update(self, update: WeightUpdate) -> None:
        if self._refetches:
            if update.bases is None:
                self._updates = {}
            self._updates[update.version] = update

    def _refuse(self, update: WeightUpdate | int, error: Exception) -> None:
        """Tell the others that this receiver does not have the version."""
        if isinstance(update, int) and self._directory is not None:
            with contextlib.suppress(DirectoryLostError):
                self._directory.ask(Record.vote, int(update), self._name, False, repr(error))

    def _let_go_of_held(self, version: int) -> None:
        """Something of a version goes into the weights: they are no longer those that were held."""
        self._held = dataclasses.replace(self._held, intact=False, loading=version)

    def _roll_back(self, loading: Loading, error: BaseException) -> None:
        """Return to the version before, if something was loaded; else there is nothing to do."""
        if not loading.touched:
            return
        held = self._held
        weights = None if held.version is None else self._rollback.weights(loading.names)
        if weights is None:
            return
        try:
            self._load(weights)
            complete = next(weights, None) is None
        except Exception as second:  # noqa: BLE001 - the first error is raised, and says that it is a mixture
            error.add_note(f"returning to version {held.version} failed, too: {second!r}")
            return
        self._held = dataclasses.replace(held, intact=complete)
        error.add_note(f"the receiver returned to version {held.version}")

    def _refetch(self, version: int) -> Iterator[Fetched]:
        update = self._updates.get(version)
        if update is None:
            update = self._need_directory().ask(Record.update, version)
        feed = UpdateFeed(update)
        feed.heading(self._return_s)
        deadline = None if self._return_s is None else time.monotonic() + self._return_s
        yield from Stream(feed, version, self._fetcher, Stopwatch(), deadline)
