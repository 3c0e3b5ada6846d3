"""The driver's side: publish in the trainer, apply in the generators, check that all hold one version."""

import asyncio
import contextlib
import inspect
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from raycrew.tensor_transport.errors import DirectoryLostError, UpdateAbortedError, WeightUpdateError
from raycrew.tensor_transport.protocols import PeerGroup
from raycrew.tensor_transport.weights._directory import RecipientVersion, Record, WeightDirectory
from raycrew.tensor_transport.weights._receiving import WeightReceipt
from raycrew.tensor_transport.weights._syncing.report import (
    RankSpan,
    SyncProgress,
    WeightSyncReport,
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
from raycrew.tensor_transport.weights._update import Stopwatch, WeightUpdate, join_updates

P = ParamSpec("P")
T = TypeVar("T")
Generators = PeerGroup | Sequence[PeerGroup]


def _called_like(other: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the parameters of another one."""

    def dressed(function: Callable[..., T]) -> Callable[P, T]:
        result = function.__annotations__["return"]
        signature = inspect.signature(other).replace(return_annotation=result)
        function.__signature__ = signature  # type: ignore[attr-defined]
        function.__annotations__ = other.__annotations__ | {"return": result}
        return function

    return dressed


def sync_weights(
    trainer: PeerGroup,
    generators: Generators,
    *,
    publish: str = "publish_weights",
    apply: str = "apply_weights",
    pause: str | None = None,
    resume: str | None = None,
    timeout_s: float | None = 600.0,
    directory: WeightDirectory | None = None,
    prepare: str | None = None,
    recipients: Sequence[int] | None = None,
    progress: Progress | None = None,
    route: WeightRoute | None = None,
) -> WeightSyncReport:
    """Bring the generators to the trainer's weights; only a small `WeightUpdate` passes through the driver.

    With a `directory`, which the publishers and receivers have, too, generators fetch what the trainer has
    put while it puts the rest, and are paused only to load it. The version counts when all of them have
    loaded it; if one fails, all return to what they had (see `WeightReceiver`'s `rollback`).

    Args:
        trainer: Its ranks have a method `publish` that returns the `WeightUpdate` on one rank, else None; or
            each rank returns its part. It is called on all ranks, whatever it is declared as.
        generators: Their ranks have a method `apply` that takes the update and returns the `WeightReceipt`.
            Several groups are updated as one.
        publish: Name of the trainer's method.
        apply: Name of the generators' method; with a directory it is given the version's number, to be
            handed on as it is.
        pause: Method called on the generators before the update is applied.
        resume: Method called on the generators afterwards, also when a pause or the update failed: on each
            rank but those whose weights are, or may be, a mixture. These stay paused until an update reaches
            them. It has to bear being called on a rank whose pause failed.
        timeout_s: Deadline of each of the steps; with a directory, of everything up to its decision.
        directory: Where the trainer announces its versions.
        prepare: With a directory: name of the generators' method that takes the version's number and calls
            `WeightReceiver.prepare`, before the pause. Without it they fetch while they are paused.
        recipients: The generators to update, numbered through all groups; all unless given.
        progress: Called with a `SyncProgress` whenever a rank has done a step, maybe in another thread. What
            it raises, this does, once all ranks have ended the step and were resumed; a version in a
            directory is given up, unless it is decided. The same holds for an interrupt from the keyboard.
        route: With a directory: how the bytes go, chosen for all ranks at once; their publishers and
            receivers have a `RouteStore`. To join it they have as long again. Updates over one route take
            turns, for which each waits as long, too.

    Raises:
        ValueError: There are no such recipients, or `prepare` or `route` has no directory.
        NoTransportError: There is no route that all ranks can use.
        WeightUpdateError: No rank, or not the right ranks published, or the generators report different
            versions.
        Exception: What the group raises for the first rank that failed; its notes name the other ranks, and
            those that were not resumed. Generators that failed still report their previous version. Without a
            directory the update stays published, and calling this again brings all of them to one version.
    """
    return _Synchronisation(
        trainer,
        generators,
        publish,
        apply,
        pause,
        resume,
        timeout_s,
        directory,
        prepare,
        recipients,
        progress,
        route,
    ).run()


@_called_like(sync_weights)
def sync_weights_async(*args: Any, **options: Any) -> Coroutine[Any, Any, WeightSyncReport]:
    """`sync_weights` without blocking the event loop, once what it returns is awaited.

    If it is cancelled, a version in a directory is given up, and the generators are resumed in the
    background; without a directory the update goes on there.

    Its arguments and errors are those of `sync_weights`; bad arguments are refused at once, before anything
    is awaited. `progress` is called in another thread.
    """
    asked = inspect.signature(sync_weights).bind(*args, **options)
    asked.apply_defaults()
    return _awaited(_Synchronisation(**asked.arguments))


async def _awaited(running: "_Synchronisation") -> WeightSyncReport:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[WeightSyncReport] = loop.create_future()
    thread = threading.Thread(target=_run_for, args=(running, loop, done), name="weight-sync", daemon=True)
    thread.start()
    try:
        return await done
    except asyncio.CancelledError:
        await asyncio.to_thread(running.give_up, "the synchronisation was cancelled")
        raise


def _run_for(
    running: "_Synchronisation", loop: asyncio.AbstractEventLoop, done: "asyncio.Future[WeightSyncReport]"
) -> None:
    def settle(report: WeightSyncReport | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if report is not None:
            done.set_result(report)
        elif error is not None:
            done.set_exception(error)

    try:
        outcome: tuple[WeightSyncReport | None, BaseException | None] = (running.run(), None)
    except BaseException as error:  # noqa: BLE001 - it is raised in the event loop
        outcome = (None, error)
    if not loop.is_closed():
        loop.call_soon_threadsafe(settle, *outcome)


@dataclass
class _Synchronisation:
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
        if self.prepare is not None and self.directory is None:
            raise ValueError("prepare= fetches what a directory announces: give directory=, too")
        if self.route is not None and self.directory is None:
            raise ValueError("route= is for versions that stream through a directory: give directory=, too")
        groups = list(self.generators) if isinstance(self.generators, list | tuple) else [self.generators]
        members = members_of(groups, self.recipients)  # type: ignore[arg-type]
        self._members, self._trainers = members, members_of([self.trainer], None)
        streams = self.directory is not None
        self._session = Session(members, self.timeout_s, together=streams, progress=self.progress)
        self._labels = [f"generator {member.number}" for member in members]
        self._watch = Stopwatch()
        self._lock = threading.Lock()
        self._version: int | None = None
        self._over, self._key = "", uuid.uuid4().hex

    def run(self) -> WeightSyncReport:
        """All steps."""
        self._started, start = time.time(), time.perf_counter()
        with contextlib.nullcontext() if self.route is None else self.route.turn(self.timeout_s):
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

    def give_up(self, reason: str) -> None:
        """Abort the version, unless it is decided; a directory that is lost keeps no version.

        One that is not begun is not begun any more.
        """
        with self._lock:
            self._over, version = self._over or reason, self._version
        if self.route is not None:
            self.route.forget()
        if self.directory is not None and version is not None:
            with contextlib.suppress(DirectoryLostError):
                self.directory.ask(Record.abort, version, reason)

    def _whole(self) -> tuple[WeightUpdate, tuple[WeightReceipt, ...]]:
        """Publish, then apply."""
        results = everyone(self.trainer).call(self.publish).get_results(timeout=self.timeout_s)
        update = _the_update(results, self.publish)
        self._tell("publish", 1, 1)
        with self._watch.measure("pause"):
            found = self._paused(lambda _: update)
        self._session.raise_first(update.version)
        return update, checked_receipts(list(found.values()), update.version, self.apply)

    def _streamed(self) -> tuple[WeightUpdate, tuple[WeightReceipt, ...]]:
        """Publish and fetch at once; load when all is there, or at once, too."""
        directory = self.directory
        if directory is None:
            raise ValueError("there is no directory")
        version, told = self._reserve(directory)
        self._session.on_failure = self.give_up
        publishing: Future[list[object]] = Future()
        threading.Thread(target=self._publish_into, args=(publishing,), daemon=True).start()
        try:
            if self.prepare:
                self._session.call("prepare", self.prepare, told)
                publishing.exception()
            found: Mapping[int, object] = {}
            if not (self._session.failures or (publishing.done() and publishing.exception())):
                with self._watch.measure("pause"):
                    found = self._paused(told)
            cause = publishing.exception()
        except BaseException as error:
            self.give_up(f"the driver raised {error!r}")
            raise
        finally:
            self._session.drop(self.apply, told)
        self._session.raise_first(version, cause if isinstance(cause, Exception) else None)
        receipts = checked_receipts(list(found.values()), version, self.apply)
        return _joined(publishing.result(), self.publish), receipts

    def _reserve(self, directory: WeightDirectory) -> tuple[int, Argument]:
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
        if session.failures:
            return {}
        return session.call("apply", self.apply, update, changes_weights=True)

    def _publish_into(self, publishing: "Future[list[object]]") -> None:
        try:
            results = everyone(self.trainer).call(self.publish).get_results(timeout=self.timeout_s)
            self._confirm(_joined(results, self.publish))
            self._tell("publish", 1, 1)
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits for it
            self.give_up(f"{self.publish}() failed: {error!r}")
            if not isinstance(error, TimeoutError):  # Ranks that are late publish yet.
                self._dismiss()
            publishing.set_exception(error)
        else:
            publishing.set_result(results)

    def _dismiss(self) -> None:
        """Tell the directory that no rank publishes the version any more that has not begun."""
        if self.directory is not None and self._version is not None:
            with contextlib.suppress(DirectoryLostError):
                self.directory.ask(Record.dismiss, self._version)

    def _confirm(self, update: WeightUpdate) -> None:
        """Tell the directory that the version is what the trainer published: it does not count before."""
        version, directory = self._version, self.directory
        if update.version != version:
            raise WeightUpdateError(
                f"{self.publish}() published version {update.version}: something else was published as "
                f"version {version}, which no generator keeps; let nobody else publish meanwhile",
                version=update.version,
            )
        if directory is not None:
            directory.ask(Record.confirm, version, self._key, update.publisher)

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
