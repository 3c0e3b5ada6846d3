"""One update after another into what `load` loads into: whole, or returned to what was there before."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from raycrew.tensor_transport.errors import (
    DirectoryLostError,
    LoadRefusedError,
    TransportTimeoutError,
    UpdateAbortedError,
)
from raycrew.tensor_transport.protocols import ByteStore
from raycrew.tensor_transport.transports import PullTransport
from raycrew.tensor_transport.weights._directory import RecipientVersion, Record
from raycrew.tensor_transport.weights._receiving.chain import apply_chain
from raycrew.tensor_transport.weights._receiving.feeds import UpdateFeed
from raycrew.tensor_transport.weights._receiving.fetching import Fetched, Fetcher, Heading, Stream
from raycrew.tensor_transport.weights._receiving.held import Held
from raycrew.tensor_transport.weights._receiving.loading import Ahead, Load, Loading, load_ahead, load_whole
from raycrew.tensor_transport.weights._receiving.member import Member
from raycrew.tensor_transport.weights._receiving.receipt import WeightReceipt
from raycrew.tensor_transport.weights._receiving.rollback import (
    NoRollback,
    RefetchRollback,
    Rollback,
    RollbackKind,
    ShadowRollback,
)
from raycrew.tensor_transport.weights._receiving.twins import Ties
from raycrew.tensor_transport.weights._update import (
    Schema,
    Stopwatch,
    WeightUpdate,
    abandon,
    as_store,
    check_cover,
    compare_schemas,
    schema_of,
)

_RETURN_S = 60.0
"""A rollback has at least so long to fetch what it returns to: the update's own time may be over."""


@dataclass(frozen=True)
class _Prepared:
    """A version that is fetched, and not loaded.

    Attributes:
        can_return: Whether what is held can be returned to at once.
        load: What loads it, if something was made ready for that.
    """

    heading: Heading
    fetched: list[Fetched]
    watch: Stopwatch
    can_return: bool
    load: Load | None


class Applier:
    """Applies updates; called by one thread at a time. The arguments are those of `WeightReceiver`.

    Attributes:
        held: What is held; other threads may read it at any time.
    """

    def __init__(
        self,
        load: Load,
        member: Member,
        *,
        expected: Mapping[str, torch.Tensor] | None,
        store: ByteStore | PullTransport | None,
        borrow: bool,
        verify_first: bool,
        verify: bool,
        rollback: RollbackKind,
        deltas: Rollback | None,
        ahead: Ahead | None,
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
        self._load, self._ahead = load, ahead
        self._member = member
        self._expected: Schema | None = None if expected is None else schema_of(expected)
        self._ties = Ties() if expected is None else Ties.of(expected)
        self._store = as_store(store)
        self._fetcher = Fetcher(self._store, borrow=borrow, verify=verify)
        self._verify_first = verify_first
        self._deltas, self._empty_rollback = deltas, kinds[rollback]
        self._rollback = deltas or self._empty_rollback()
        self._can_return = True
        self._refetches = rollback == "refetch"
        self.held = Held()
        self._return_s: float | None = _RETURN_S
        self._updates: dict[int, WeightUpdate] = {}
        self._prepared: _Prepared | None = None

    def apply(self, update: WeightUpdate | int, timeout_s: float | None) -> WeightReceipt:
        """See `WeightReceiver.apply`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._return_s = None if timeout_s is None else max(timeout_s, _RETURN_S)
        prepared, self._prepared = self._prepared, None
        ready = prepared is not None and prepared.heading.version == update
        heading: Heading | None = None
        try:
            stream: Iterable[Fetched]
            if isinstance(update, RecipientVersion) and update.is_over:
                raise UpdateAbortedError(f"version {update} was given up before it was loaded")
            if ready and prepared is not None:
                if not (prepared.heading.is_vote and prepared.can_return):
                    self._member.feed(update, reads=False).heading(timeout_s)  # Unless it was given up.
                heading, stream, watch = prepared.heading, prepared.fetched, prepared.watch
            else:
                heading, stream, watch = self._begin(update, timeout_s, whole=self._verify_first)
            if heading.is_vote and self._is_behind(heading):
                self._catch_up(max(heading.bases or ()), deadline)
            waited_s = watch.total("wire")
            if self._holds(heading):
                if not isinstance(update, WeightUpdate):
                    self._member.hold(heading.version, self._store, is_known=False)
                return WeightReceipt(heading.version, 0, 0.0, 0.0, self.held.version)
            self._check(heading)
            load = prepared.load if ready and prepared is not None else None
            loading = self._load_all(heading, stream, watch, load)
        except BaseException as error:
            self._refuse(update, heading, error)
            raise
        self._settle(heading, loading, deadline)
        return self._commit(update, heading, loading, watch, waited_s)

    def prepare(self, version: int, timeout_s: float | None) -> WeightReceipt:
        """See `WeightReceiver.prepare`."""
        self._prepared = None
        heading: Heading | None = None
        try:
            is_ahead = self._ahead is not None
            heading, stream, watch = self._begin(version, timeout_s, whole=not is_ahead, eager=is_ahead)
            is_behind = heading.is_vote and self._is_behind(heading)
            if not is_behind:  # Else it catches up when it may be loaded.
                self._check(heading)
            load = None
            if self._ahead is None or is_behind:
                fetched = list(stream)
            else:
                loading = Loading(heading, self._expected, keep=True, ties=self._ties)
                load = load_ahead(self._ahead, loading, stream, watch)
                fetched = loading.fetched
            names = frozenset(entry.name for one in fetched for entry in one.parcel.entries)
            can_return = self.held.is_whole and self._rollback.is_at_hand(names)
            self._prepared = _Prepared(heading.with_all(fetched), fetched, watch, can_return, load)
        except BaseException as error:
            self._refuse(version, heading, error)
            raise
        wire_s, previous = watch.total("wire"), self.held.version
        return WeightReceipt(int(version), stream.size_bytes, wire_s, 0.0, previous, watch.spans, can_return)

    def forget(self) -> None:
        """Give up what is fetched, and what is kept for a rollback."""
        self._prepared, self._rollback, self._updates = None, NoRollback(), {}

    def _refuse(self, update: WeightUpdate | int, heading: Heading | None, error: BaseException) -> None:
        """Tell the others that this receiver does not have a version; if they wait for it, they need not."""
        self._member.refuse(update, error)
        if isinstance(update, RecipientVersion) if heading is None else heading.is_vote:
            abandon(self._store)

    def _begin(
        self, update: WeightUpdate | int, timeout_s: float | None, *, whole: bool, eager: bool = False
    ) -> tuple[Heading, Stream, Stopwatch]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        watch = Stopwatch()
        is_patient = whole and self._fetcher.takes_no_time
        feed = self._member.feed(update, is_patient=is_patient)
        try:
            with watch.measure("wire") if is_patient else contextlib.nullcontext():
                heading = feed.heading(timeout_s)
        except TransportTimeoutError as error:
            raise UpdateAbortedError(f"version {update} was not there in time: {error}") from error
        if heading.is_vote and heading.bases is not None and not self.held.is_whole:
            self._catch_up(max(heading.bases, default=None), deadline)
        how = {"whole": whole, "eager": eager}
        stream = Stream(feed, heading.version, self._fetcher, watch, deadline, **how)
        return heading, stream, watch

    def _is_behind(self, heading: Heading) -> bool:
        """Whether whole weights are of a version before those that a partial one can be added to.

        So are those of a version that the directory did not number.
        """
        before = (self.held.number or 0) < min(heading.bases or (0,))
        return self.held.is_whole and before and not self._has_base(heading)

    def _has_base(self, heading: Heading) -> bool:
        """Whether a partial version can be added to what is held."""
        its = (heading.bases or (), heading.publisher)
        return self.held.is_one_of(*its, is_numbered_once=heading.is_numbered_once)

    def _catch_up(self, version: int | None, deadline: float | None) -> None:
        """Come to what a partial version is added to, with the versions between."""
        chain = self._member.directory.ask(Record.chain, version, self.held.number)
        apply_chain(chain, deadline, lambda: self.held, self.apply)

    def _holds(self, heading: Heading) -> bool:
        held = self.held
        same = heading.publisher == held.publisher and heading.version == held.version
        return same and held.intact

    def _check(self, heading: Heading) -> None:
        """Refuse, before a byte moves, what does not fit."""
        version, its = heading.version, (heading.version, heading.publisher, heading.bases)
        self.held.check_next(*its, is_numbered_once=heading.is_numbered_once)
        if heading.entries is not None:
            check_cover(itertools.chain.from_iterable(heading.entries), version)
        if self._expected is not None and heading.schema is not None:
            compare_schemas(self._expected, heading.schema, version, partial=heading.bases is not None)
            self._ties.check_together(heading.schema, version)

    def _load_all(
        self, heading: Heading, stream: Iterable[Fetched], watch: Stopwatch, prepared: Load | None
    ) -> Loading:
        loading = Loading(
            heading,
            self._expected,
            keep=self._rollback.keeps_buckets,
            on_touch=self._let_go_of_held,
            ties=self._ties,
        )
        if self._verify_first:
            stream = list(stream)
        before = self.held
        if prepared is not None:
            loading.touch()  # What has the tensors already need not take one before it changes something.
        try:
            load_whole(prepared or self._load, loading, stream, watch)
        except LoadRefusedError:
            self.held = before
            raise
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
            self._member.hear(heading.version, deadline, self._store)
        except BaseException as error:
            if isinstance(error, DirectoryLostError):
                self._member.take_back(heading.version, error)
            if isinstance(error, Exception):
                self._roll_back(loading, error)
            raise

    def _commit(
        self,
        update: WeightUpdate | int,
        heading: Heading,
        loading: Loading,
        watch: Stopwatch,
        waited_s: float,
    ) -> WeightReceipt:
        previous = self.held
        if self._expected is None and self._deltas is None:
            self._expected = loading.schema
        rollback, self._rollback = self._rollback, self._deltas or self._empty_rollback()
        self.held = previous.followed_by(
            heading.version, heading.publisher, is_numbered_once=heading.is_numbered_once
        )
        rollback.committed(heading.version, loading.fetched)
        if heading.bases is None:
            self._updates = {}
        if isinstance(update, WeightUpdate) and self._refetches:
            self._updates[update.version] = update
        self._rollback = rollback  # Who is broken off before that has nothing to return to.
        if not isinstance(update, WeightUpdate):
            self._member.hold(heading.version, self._store, is_known=heading.is_vote)
        return WeightReceipt(
            heading.version,
            loading.size_bytes,
            watch.total("wire"),
            max(0.0, watch.total("load") - (watch.total("wire") - waited_s)),
            previous.version,
            watch.spans,
        )

    def _let_go_of_held(self, version: int) -> None:
        """Something of a version goes into the weights: they are no longer those that were held.

        A `DeltaTarget` returns to what it has now, which who was broken off may have to be told.
        """
        self._can_return = self._deltas is None or self.held.intact
        if self.held.intact:
            self._rollback.committed(0, ())
        self.held = dataclasses.replace(self.held, intact=False, loading=version)

    def _roll_back(self, loading: Loading, error: BaseException) -> None:
        """Return to the version before, if something was loaded; else there is nothing to do."""
        if not loading.touched:
            return
        held = self.held
        is_known = held.version is not None and self._can_return
        weights = self._rollback.weights(loading.names) if is_known else None
        if weights is None:
            return
        try:
            self._load(weights)
            complete = next(weights, None) is None
        except Exception as second:  # noqa: BLE001 - the first error is raised, and says that it is a mixture
            error.add_note(f"returning to version {held.version} failed, too: {second!r}")
            return
        self.held = dataclasses.replace(held, intact=complete)
        error.add_note(f"the receiver returned to version {held.version}")

    def _refetch(self, version: int) -> Iterator[Fetched]:
        update = self._updates.get(version)
        if update is None:
            update = self._member.directory.ask(Record.update, version)
        feed = UpdateFeed(update)
        feed.heading(self._return_s)
        deadline = None if self._return_s is None else time.monotonic() + self._return_s
        yield from Stream(feed, version, self._fetcher, Stopwatch(), deadline)
