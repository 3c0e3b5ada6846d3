"""One synchronisation: publish in the trainer, apply in the generators, check that all hold one version."""

import contextlib
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from raycrew.tensor_transport._ray import answered
from raycrew.tensor_transport.errors import DirectoryLostError, UpdateAbortedError, WeightUpdateError
from raycrew.tensor_transport.protocols import PeerGroup
from raycrew.tensor_transport.weights._directory import RecipientVersion, Record, WeightDirectory
from raycrew.tensor_transport.weights._receiving import WeightReceipt
from raycrew.tensor_transport.weights._syncing.mixtures import pauses_of
from raycrew.tensor_transport.weights._syncing.report import (
    RankSpan,
    SyncProgress,
    WeightSyncReport,
    can_return,
    checked_receipts,
)
from raycrew.tensor_transport.weights._syncing.routing import WeightRoute
from raycrew.tensor_transport.weights._syncing.session import (
    Argument,
    Progress,
    Session,
    everyone,
    members_of,
)
from raycrew.tensor_transport.weights._syncing.turns import Turn
from raycrew.tensor_transport.weights._update import Stopwatch, WeightUpdate, join_updates

Generators = PeerGroup | Sequence[PeerGroup]


@dataclass
class Synchronisation:
    """One call of `sync_weights`."""

    trainer: PeerGroup
    generators: Generators
    publish: str
    apply: str
    pause: str | None
    resume: str | None
    timeout_s: float | None
    directory: WeightDirectory | None
    prepare: str | None
    recipients: Sequence[int] | None
    progress: Progress | None
    route: WeightRoute | None

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {self.timeout_s}")
        if self.timeout_s == math.inf:  # Groups of workers know None alone.
            self.timeout_s = None
        if self.prepare is not None and self.directory is None:
            raise ValueError("prepare= fetches what a directory announces: give directory=, too")
        if self.route is not None and self.directory is None:
            raise ValueError("route= is for versions that stream through a directory: give directory=, too")
        given: Any = self.generators
        groups: list[PeerGroup] = list(given) if isinstance(given, list | tuple) else [given]
        members = members_of(groups, self.recipients)
        once = {id(group): group for group in groups}
        self._groups = [once[i] for i in sorted(once)]  # In one order: else two updates wait for each other.
        self._members, self._trainers = members, members_of([self.trainer], None)
        streams = self.directory is not None
        self._session = Session(members, self.timeout_s, together=streams, progress=self.progress)
        self._labels = [f"generator {member.number}" for member in members]
        self._watch = Stopwatch()
        self._lock = threading.Lock()
        self._version: int | None = None
        self._over, self._key = "", uuid.uuid4().hex
        self._my_turn: Turn | None = None

    def run(self) -> WeightSyncReport:
        """All steps."""
        self._started, start = time.time(), time.perf_counter()
        with self._turn():
            update, receipts = self._streamed() if self.directory is not None else self._whole()
        return WeightSyncReport(
            version=update.version,
            size_bytes=max(receipt.size_bytes for receipt in receipts),
            gather_s=update.gather_s + update.put_s,
            wire_s=max(receipt.wire_s for receipt in receipts),
            load_s=max(receipt.load_s for receipt in receipts),
            pause_s=self._watch.total("pause"),
            total_s=time.perf_counter() - start,
            receipts=receipts,
            spans=self._spans(update, receipts),
            publisher=update.publisher,
            started_at=self._started,
        )

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Over a route, updates take turns; one that is given up before its turn touches nothing."""
        if self.route is None:
            yield
            return
        with contextlib.ExitStack() as turn:
            with self._watch.measure("turn"):
                self._my_turn = turn.enter_context(self.route.turn(self.timeout_s, self._check_wanted))
            yield

    def give_up(self, reason: str) -> None:
        """Abort the version, unless it is decided; a directory that is lost keeps no version.

        One that is not begun is not begun any more.
        """
        with self._lock:
            self._over, version = self._over or reason, self._version
        if self.route is not None and self._my_turn is not None:
            self.route.forget()
        if self.directory is not None and version is not None:
            with contextlib.suppress(DirectoryLostError):
                self.directory.ask(Record.abort, version, reason)

    def _whole(self) -> tuple[WeightUpdate, tuple[WeightReceipt, ...]]:
        """Publish, then apply."""
        results = everyone(self.trainer).call(self.publish).get_results(timeout=self.timeout_s)
        update = _the_update(results, self.publish)
        self._tell("publish", 1, 1)
        with self._pausing(), self._watch.measure("pause"):
            found = self._paused(lambda _: update)
        self._session.raise_first(update.version)
        return update, checked_receipts(found, update.version, self.apply)

    def _streamed(self) -> tuple[WeightUpdate, tuple[WeightReceipt, ...]]:
        """Publish and fetch at once; load when all is there, or at once, too."""
        directory = self.directory
        if directory is None:
            raise ValueError("there is no directory")
        version, told = self._reserve(directory)
        self._session.on_failure = self.give_up
        publishing: Future[WeightUpdate] = Future()
        confirming: Future[None] = Future()
        threading.Thread(target=self._publish_into, args=(publishing, confirming), daemon=True).start()
        try:
            if self.prepare:
                prepared = self._session.call("prepare", self.prepare, told)
                if not all(map(can_return, prepared.values())):  # What is given up has to touch nothing.
                    publishing.exception()
            found: Mapping[int, object] = {}
            if not self._is_given_up:
                with self._pausing(), self._watch.measure("pause"):
                    found = self._paused(told)
            cause = publishing.exception() or confirming.exception()
        except BaseException as error:
            self.give_up(f"the driver raised {error!r}")
            raise
        finally:
            self._session.drop(self.apply, lambda number: told(number).given_up)
        self._session.raise_first(version, cause if isinstance(cause, Exception) else None)
        if not found:
            raise UpdateAbortedError(f"the update was given up: {self._over}", version=version)
        receipts = checked_receipts(found, version, self.apply)
        return publishing.result(), receipts

    @property
    def _is_given_up(self) -> bool:
        """Whether there is nothing to load any more; without a directory an update stays published."""
        return bool(self._session.failures) or (self.directory is not None and bool(self._over))

    def _reserve(self, directory: WeightDirectory) -> tuple[int, Callable[[int], RecipientVersion]]:
        """The number of this version, and as each rank is told it; unless it was given up before."""
        self._check_wanted()
        ballots = {number: uuid.uuid4().hex for number in self._session.numbers}
        ranks = (self._trainers, self._members)
        route = "" if self.route is None else self.route.connect(*ranks, self.timeout_s)
        asked = (list(ballots.values()), self.timeout_s, self._key, route)
        version = directory.ask(Record.reserve, *asked)
        with self._lock:
            self._version, over = version, self._over
        if over:
            self.give_up(over)
            self._dismiss()
            self._check_wanted()
        return version, lambda number: RecipientVersion(version, ballots[number])

    def _check_wanted(self) -> None:
        if self._over:
            raise UpdateAbortedError(f"the update was given up before it began: {self._over}")

    @contextlib.contextmanager
    def _pausing(self) -> Iterator[None]:
        """One update at a time pauses a group: one that is given up resumes it only when it has ended."""
        with contextlib.ExitStack() as turns:
            for group in self._groups if self.pause or self.resume else ():
                turns.enter_context(pauses_of(group).turn(self.timeout_s, self._check_going))
            yield

    def _check_going(self) -> None:
        if self._is_given_up:
            raise UpdateAbortedError(f"the update was given up: {self._over}", version=self._version or 0)

    def _paused(self, update: Argument) -> Mapping[int, object]:
        """Apply an update while the generators are paused; they are resumed whatever happens."""
        try:
            try:
                return self._swapped(update)
            finally:
                if self.resume is not None:
                    self._session.resume(self.resume)
        except BaseException as error:
            self._session.explain(error)
            raise

    def _swapped(self, update: Argument) -> Mapping[int, object]:
        session = self._session
        if self.pause is not None:
            session.call("pause", self.pause)
        if self._is_given_up:
            return {}
        return session.call("apply", self.apply, update, changes_weights=True)

    def _publish_into(self, publishing: "Future[WeightUpdate]", confirming: "Future[None]") -> None:
        """In a thread of its own, which this update waits for."""
        with contextlib.nullcontext() if self._my_turn is None else self._my_turn.shared():
            self._publish(publishing, confirming)

    def _publish(self, publishing: "Future[WeightUpdate]", confirming: "Future[None]") -> None:
        """Generators load while the directory is told that what was published is what was asked for."""
        try:
            called = everyone(self.trainer).call(self.publish)
            update = _joined(answered(called, self.timeout_s, self._give_up_published), self.publish)
            self._check_number(update)
            self._tell("publish", 1, 1)
            publishing.set_result(update)
            self._confirm(update)
            confirming.set_result(None)
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits for it
            self._give_up_published(error)
            if not isinstance(error, TimeoutError):  # Ranks that are late publish yet.
                self._dismiss()
            for outcome in (publishing, confirming):
                if not outcome.done():
                    outcome.set_exception(error)

    def _give_up_published(self, error: BaseException) -> None:
        self.give_up(f"{self.publish}() failed: {error!r}")

    def _dismiss(self) -> None:
        """Tell the directory that no rank publishes the version any more that has not begun."""
        if self.directory is not None and self._version is not None:
            with contextlib.suppress(DirectoryLostError):
                self.directory.ask(Record.dismiss, self._version)

    def _check_number(self, update: WeightUpdate) -> None:
        version = self._version
        if update.version != version:
            raise WeightUpdateError(
                f"{self.publish}() published version {update.version}: something else was published as "
                f"version {version}, which no generator keeps; let nobody else publish meanwhile",
                version=update.version,
            )

    def _confirm(self, update: WeightUpdate) -> None:
        """Tell the directory that the version is what the trainer published: it does not count before."""
        if self.directory is not None:
            self.directory.ask(Record.confirm, update.version, self._key, update.publisher)

    def _tell(self, phase: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(SyncProgress(phase, done, total))

    def _spans(self, update: WeightUpdate, receipts: Sequence[WeightReceipt]) -> tuple[RankSpan, ...]:
        sides = [("trainer", update.spans), ("generators", self._watch.spans)]
        sides += [(label, receipt.spans) for label, receipt in zip(self._labels, receipts, strict=False)]
        return tuple(
            RankSpan(label, span.phase, span.start_s - self._started, span.end_s - self._started)
            for label, spans in sides
            for span in spans
        )


def _joined(results: Sequence[object], method: str) -> WeightUpdate:
    updates = [result for result in results if isinstance(result, WeightUpdate)]
    if not updates:
        raise WeightUpdateError(f"{method}() has to return a WeightUpdate on the ranks that publish")
    return join_updates(updates)


def _the_update(results: Sequence[object], method: str) -> WeightUpdate:
    updates = [result for result in results if isinstance(result, WeightUpdate)]
    strangers = [type(r).__name__ for r in results if r is not None and not isinstance(r, WeightUpdate)]
    if not strangers and len(updates) > 1 and {u.parts for u in updates} == {len(updates)}:
        return join_updates(updates)
    if len(updates) != 1 or strangers:
        found = ", ".join(strangers) or f"{len(updates)} updates"
        raise WeightUpdateError(f"{method}() has to return a WeightUpdate on exactly one rank; got {found}")
    return join_updates(updates)
