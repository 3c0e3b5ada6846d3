"""Whom a publisher tells what it does: nobody, or a directory of versions."""

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from raycrew.tensor_transport.errors import DirectoryLostError, TransportError
from raycrew.tensor_transport.protocols import ByteStore
from raycrew.tensor_transport.weights._directory.directory import WeightDirectory
from raycrew.tensor_transport.weights._directory.lineage import Lineage
from raycrew.tensor_transport.weights._directory.pace import Pace
from raycrew.tensor_transport.weights._directory.record import Record
from raycrew.tensor_transport.weights._directory.versions import (
    SMALL_BYTES,
    Announced,
    Begin,
    Finish,
    check_named,
)
from raycrew.tensor_transport.weights._update import (
    BroadcastStore,
    Bucket,
    BucketPlan,
    Stopwatch,
    WeightUpdate,
    release_scope,
    sealed,
)

_LATER = 0
"""In place of the number of a version that is not begun yet."""


class Teller(Protocol):
    """Counts versions, and hears what becomes of them."""

    @property
    def streams(self) -> bool:
        """Whether buckets are of use before the last one is put."""
        ...

    @property
    def counts_later(self) -> bool:
        """Whether a version that is finished can still be aborted until `publish` returns."""
        ...

    def begin(self, version: int | None, plan: BucketPlan | None, names: frozenset[str] | None) -> int:
        """A version begins; its number."""
        ...

    def route(self, version: int) -> tuple[str, float | None]:
        """The key of the route over which receivers take a version while it is put; "" where none do.

        And how many seconds they have for it.
        """
        ...

    def make_room(self, version: int, size_bytes: int, window_bytes: int | None) -> None:
        """Wait until so many bytes may be put, of which at most a window is not fetched by all."""
        ...

    def announce(self, version: int, announced: Announced, *, is_only: bool) -> None:
        """A bucket was put; `is_only` where `finish` comes next, and no other one before or after."""
        ...

    def finish(
        self, version: int, plan: BucketPlan, buckets: Sequence[Bucket], watch: Stopwatch, waited_s: float
    ) -> WeightUpdate:
        """All buckets were put."""
        ...

    def abort(self, version: int, reason: str) -> bool:
        """There will be no more buckets; whether nobody needs those of the version any more.

        Raises:
            DirectoryLostError: Who knows does not answer, and may count the version when it does.
        """
        ...

    def close(self) -> None:
        """There will be no more versions."""
        ...


class LoneTeller:
    """Tells nobody."""

    streams = counts_later = False

    def __init__(self, name: str, part: int, parts: int) -> None:
        self._name, self._part, self._parts = name, part, parts
        self._last = 0
        self._lineage = Lineage()
        self._names: frozenset[str] | None = None

    def begin(self, version: int | None, plan: BucketPlan | None, names: frozenset[str] | None) -> int:  # noqa: ARG002
        if version is None:
            check_named(self._part, self._parts)
            version = self._last + 1
        elif version <= self._last:
            raise ValueError(f"version must be above the last one, {self._last}, got {version}")
        if names is not None and not self._lineage.bases({0: names}):
            raise ValueError("there is no version that a partial update could be added to")
        self._names = names
        return version

    def route(self, version: int) -> tuple[str, float | None]:  # noqa: ARG002
        return "", None

    def make_room(self, version: int, size_bytes: int, window_bytes: int | None) -> None:
        pass

    def announce(self, version: int, announced: Announced, *, is_only: bool) -> None:
        pass

    def finish(
        self, version: int, plan: BucketPlan, buckets: Sequence[Bucket], watch: Stopwatch, waited_s: float
    ) -> WeightUpdate:
        names = {0: self._names}
        update = WeightUpdate(
            publisher=self._name,
            version=version,
            tensors=plan.tensors,
            buckets=tuple(buckets),
            gather_s=watch.total("gather") - waited_s,
            put_s=watch.total("put"),
            part=self._part,
            parts=self._parts,
            bases=self._lineage.bases(names),
            spans=watch.spans,
        )
        self._lineage.note(version, names)
        self._last = version
        return sealed(update, plan)

    def abort(self, version: int, reason: str) -> bool:  # noqa: ARG002
        return True

    def close(self) -> None:
        pass


class DirectoryTeller:
    """Tells a directory, which numbers versions and says when there is room for more bytes."""

    streams, counts_later = True, False

    def __init__(
        self,
        directory: WeightDirectory,
        store: ByteStore,
        name: str,
        part: int,
        parts: int,
        timeout_s: float | None,
    ) -> None:
        self._directory, self._store, self._name = directory, store, name
        self._part, self._parts = part, parts
        self._timeout_s = timeout_s
        self._scope, self._returns = release_scope(store, name), Returns(directory)
        self._known = ""
        self._waiting: list[Announced] = []
        self._pace, self._is_awaited = Pace(), True
        self._unsaid: Begin | None = None
        self._said: tuple[Bucket, ...] = ()
        self._route: tuple[str, float | None] = ("", None)
        self._sends_at_once = isinstance(store, BroadcastStore)
        directory.ask(Record.enroll, part, name, self._scope)

    def begin(self, version: int | None, plan: BucketPlan | None, names: frozenset[str] | None) -> int:
        digest = "" if plan is None else plan.digest
        unknown = plan if digest != self._known else None
        begin = Begin(self._part, self._parts, self._name, self._scope, version, digest, unknown, names)
        self._waiting, self._pace, self.counts_later, self._said = [], Pace(), False, ()
        if not self._is_awaited:  # Most likely by nobody this time either; the end says so.
            self._pace.said(math.inf)
        self._known = ""  # What the directory knows after a failure is not known here.
        self._unsaid = begin if plan is not None and self._fits_one_message(plan) else None
        if self._unsaid is not None:
            return _LATER
        begun = self._directory.wait(Record.start, self._timeout_s, begin)
        self._known, self._route = digest, (begun.route, begun.left_s)
        self.counts_later = begun.is_unconfirmed
        self._returns.give_back(self._store, begun.freed)
        return begun.number

    def route(self, version: int) -> tuple[str, float | None]:  # noqa: ARG002
        return self._route

    def make_room(self, version: int, size_bytes: int, window_bytes: int | None) -> None:
        if window_bytes is not None and self._unsaid is None:
            self._say(version)
            asked = (version, self._part, self._name, size_bytes, window_bytes)
            self._directory.wait(Record.credit, self._timeout_s, *asked)
            self._collect()

    def announce(self, version: int, announced: Announced, *, is_only: bool) -> None:
        self._waiting.append(announced)
        is_soon = announced.entries is None and self._pace.is_silent()
        if self._sends_at_once or not (is_only or is_soon):
            self._say(version)

    def finish(
        self, version: int, plan: BucketPlan, buckets: Sequence[Bucket], watch: Stopwatch, waited_s: float
    ) -> WeightUpdate:
        begin, self._unsaid = self._unsaid, None
        known = self._known if begin is None else begin.digest
        late = None if plan.digest == known else plan
        times = (watch.total("gather") - waited_s, watch.total("put"), watch.spans)
        finish = Finish(self._part, self._name, len(buckets), late, *times, tuple(self._waiting))
        if begin is None:
            update, freed, self._is_awaited = self._directory.ask(Record.end, version, finish, self._scope)
        else:
            self._said = tuple(buckets)
            update, freed, _ = self._directory.wait(Record.publish, self._timeout_s, begin, finish)
            self._known = begin.digest
        self._returns.give_back(self._store, freed)
        return update

    def abort(self, version: int, reason: str) -> bool:
        begin, self._unsaid = self._unsaid, None
        if begin is not None:
            version = self._begun(begin)
        elif self._said:  # In one message, which is there or not: an interrupt may hide the answer.
            asked = (self._part, self._name, self._said)
            version = self._directory.ask(Record.version_with, *asked) or _LATER
        if version == _LATER:
            return True
        said = (version, f"part {self._part}: {reason}", self._part, self._name)
        is_over = self._directory.ask(Record.abort, *said)
        with contextlib.suppress(DirectoryLostError):  # They are told of again.
            self._collect()
        return is_over

    def close(self) -> None:
        with contextlib.suppress(DirectoryLostError):
            self._directory.ask(Record.retire, self._part, self._name)
            self._collect()

    def _say(self, version: int) -> None:
        """Announce what is not announced yet."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            began = time.monotonic()
            is_awaited = self._directory.ask(Record.announce, version, self._name, *waiting)
            self._pace.said(time.monotonic() - began if is_awaited else math.inf)

    def _fits_one_message(self, plan: BucketPlan) -> bool:
        """Whether all of a version can be said at once: nobody would have read any of it before."""
        sizes = plan.bucket_sizes
        return not self._sends_at_once and len(sizes) == 1 and sizes[0] <= SMALL_BYTES

    def _begun(self, begin: Begin) -> int:
        """The version that a part was wanted for, now that it won't come: for others to hear of that."""
        with contextlib.suppress(TransportError, ValueError):
            return self._directory.ask(Record.begin, begin) or _LATER
        return _LATER

    def _collect(self) -> None:
        self._returns.collect(self._store, self._scope)


class Returns:
    """Buckets that nobody needs any more, on their way back to a store.

    What an interrupt keeps here goes back the next time.

    Args:
        directory: Where it is heard of them.
    """

    def __init__(self, directory: WeightDirectory) -> None:
        self._directory = directory
        self._tickets: list[Any] = []

    def collect(self, store: ByteStore, scope: str, receiver: str = "") -> None:
        """Release those of this scope, if there may be some."""
        self.give_back(store, self._directory.ask(Record.collect, scope, receiver) if scope else ())

    def keep(self, tickets: Iterable[Any]) -> None:
        """Have these go back with the next ones."""
        self._tickets += tickets

    def give_back(self, store: ByteStore, tickets: Iterable[Any] = ()) -> None:
        """Release what these find, and what is here; several threads may."""
        self.keep(tickets)
        for ticket in tuple(self._tickets):
            try:
                with contextlib.suppress(TransportError):  # Its store, or that of its publisher, is gone.
                    store.release(ticket)
            except Exception:
                self._forget(ticket)
                raise
            self._forget(ticket)

    def _forget(self, ticket: Any) -> None:
        with contextlib.suppress(ValueError):  # another thread has
            self._tickets.remove(ticket)
