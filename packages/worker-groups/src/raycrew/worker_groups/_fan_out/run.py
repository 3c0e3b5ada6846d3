"""One call of `fan_out` from its first batch to its last."""

import logging
import os
import pickle
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray import ObjectRef
from ray.exceptions import RayActorError, RayError

from raycrew.cluster_core import Session
from raycrew.worker_groups._fan_out.batches import Backlog, BatchSizer, Entry
from raycrew.worker_groups._fan_out.hearing import SILENT_S, Hearing
from raycrew.worker_groups._fan_out.observing import tell_of_batch
from raycrew.worker_groups._fan_out.outcomes import (
    FunctionLoadError,
    ItemCrashedError,
    ItemError,
    ItemOutcome,
    ItemTimeoutError,
)
from raycrew.worker_groups._fan_out.processes import BatchReport, Finished, Function, dumps
from raycrew.worker_groups._fan_out.reports import ended_items, failure_in
from raycrew.worker_groups._fan_out.warm_pool import Member, Pool
from raycrew.worker_groups._health import observed
from raycrew.worker_groups._ray import while_connected
from raycrew.worker_groups._worker import pick_secrets
from raycrew.worker_groups.errors import WorkerGroupError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
MAX_LOSSES = 3
MAX_FAILED_STARTS = 3
LONG_BATCH_S = 0.5
"""From this length on, sending the next batch only when one has ended costs nothing worth mentioning."""


@dataclass(frozen=True)
class Limits:
    """What the caller allows."""

    max_in_flight: int | None
    timeout_s: float | None
    retries: int


@dataclass(frozen=True)
class _Batch:
    number: int
    member: Member
    entries: list[Entry]
    sent: float


class Run:
    """Sends batches, takes in reports, and sends again what did not get its chance.

    Args:
        pool: Where to run.
        slots: Processes by node id.
        function: What to run.
        items: The source.
        length: Number of items, if known.
        sizer: Decides on batch sizes.
        limits: What the caller allows.
    """

    def __init__(
        self,
        pool: Pool,
        slots: Mapping[str, int],
        function: Function,
        items: Iterator[Any],
        length: int | None,
        sizer: BatchSizer,
        limits: Limits,
    ) -> None:
        self._pool = pool
        self._slots = dict(slots)
        self._function = function
        self._keys = function.keys
        self._code = pool.argument(function.code)
        self._initializer = function.initializer and pool.argument(function.initializer)
        self._secrets = pick_secrets((), os.environ)
        self._sizer = sizer
        self._limits = limits
        self._call_id = uuid.uuid4().hex
        self._outcomes: deque[ItemOutcome[Any]] = deque()
        self._backlog = Backlog(items, dumps, self._refuse, length)
        self._ready: dict[str, Member] = {}
        self._starting: dict[ObjectRef[str], Member] = {}
        self._in_flight: dict[ObjectRef[BatchReport], _Batch] = {}
        self._sent: Counter[Member] = Counter()
        self._isolated: set[Member] = set()
        self._failed_starts = 0
        self._hearing = Hearing(pool.ask, pool.is_answered)

    def outcomes(self) -> Iterator[ItemOutcome[Any]]:
        """Every item's outcome as it comes; closing the iterator gives up what is left."""
        try:
            for node_id in self._slots:
                self._join(node_id)
            while True:
                while self._outcomes:
                    yield self._outcomes.popleft()
                self._fill()
                if self._outcomes:  # items that could not even be pickled
                    continue
                if self._in_flight:
                    self._wait()
                elif self._backlog.remaining == 0:
                    return
                elif not self._ready:
                    self._wait()
        finally:
            self._give_up()

    # Hosts

    def _join(self, node_id: str) -> None:
        member = self._pool.member(node_id)
        self._starting[member.ready] = member

    def _lose(self, member: Member, why: object, *, again: bool) -> None:
        """A host is of no use any more: its node gets another if it may, and the last node must."""
        self._pool.check_open()
        self._ready.pop(member.node_id, None)
        self._pool.drop(member)
        logger.warning("the fan-out host on node %s was lost: %s", member.node_id, why)
        living = self._pool.living_nodes()
        if again and member.node_id in living:
            self._join(member.node_id)
            return
        self._slots.pop(member.node_id, None)
        if not self._slots:
            node_id = next(iter(living))
            self._slots[node_id] = 1
            self._join(node_id)

    # Out

    def _fill(self) -> None:
        self._pool.check_open()
        while (member := self._with_room()) is not None:
            size = self._sizer.size(sum(self._slots.values()), self._backlog.remaining)
            if self._limits.max_in_flight is not None:
                size = min(
                    size, self._limits.max_in_flight - sum(len(b.entries) for b in self._in_flight.values())
                )
            entries = self._backlog.take(size)
            if not entries:
                return
            self._send(member, entries)

    def _with_room(self) -> Member | None:
        """The host with the most room, if any: a batch per process, and one waiting if batches are short.

        A suspect item takes an idle host, which gets nothing else until it is done.
        """
        open_to_all = (member for member in self._ready.values() if member not in self._isolated)
        member = min(open_to_all, key=lambda m: self._sent[m] / self._slots[m.node_id], default=None)
        if member is None:
            return None
        room = 1 if self._backlog.next_is_suspect else self._depth() * self._slots[member.node_id]
        return member if self._sent[member] < room else None

    def _depth(self) -> int:
        estimate_s = self._sizer.estimate_s
        batch_s = None if estimate_s is None else estimate_s * self._sizer.size(1, None)
        return 2 if batch_s is not None and batch_s < LONG_BATCH_S else 1

    def _send(self, member: Member, entries: list[Entry]) -> None:
        number, sent = self._pool.next_batch(), time.monotonic()
        with while_connected(self._pool.check_open):
            ref = member.handle.run.remote(
                self._call_id,
                self._slots[member.node_id],
                number,
                self._keys,
                self._code,
                self._initializer,
                [entry.payload for entry in entries],
                self._limits.timeout_s,
                self._secrets,
            )
        self._in_flight[ref] = _Batch(number, member, entries, sent)
        self._sent[member] += 1
        if entries[0].suspect:
            self._isolated.add(member)

    def _give_up(self) -> None:
        busy = {batch.member for batch in self._in_flight.values()}
        self._in_flight.clear()
        if busy:
            self._pool.give_up(self._call_id, busy)

    # In

    def _wait(self) -> None:
        with while_connected(self._pool.check_open) as session:
            self._pool.look_again()
            self._take_one(session)
            if not self._hearing.pause_s:
                for member in self._hearing.fallen_silent({b.member for b in self._in_flight.values()}):
                    self._fell_silent(member)

    def _take_one(self, session: Session) -> None:
        refs = [*self._starting, *self._in_flight]
        timeout_s = self._hearing.pause_s if self._in_flight else START_TIMEOUT_S
        done, _ = session.wait(refs, timeout=timeout_s)
        for ref in done:
            if ref in self._starting:
                self._started(session, self._starting.pop(ref))
            else:
                self._ended(session, ref, self._in_flight.pop(ref))
        if not done and not self._in_flight:
            raise WorkerGroupError(f"no node was ready to run items within {START_TIMEOUT_S:.0f} s")

    def _fell_silent(self, member: Member) -> None:
        """A host does not answer: it is given up only where its items have a time to keep to."""
        why = f"it has not answered for {SILENT_S:.0f} s; is its process stopped?"
        if self._limits.timeout_s is None:
            logger.warning("the fan-out host on node %s is waited for: %s", member.node_id, why)
            return
        self._lose(member, why, again=True)
        for ref in [ref for ref, batch in self._in_flight.items() if batch.member is member]:
            self._lost(self._in_flight.pop(ref), "was lost with its host, which did not answer")

    def _started(self, session: Session, member: Member) -> None:
        try:
            session.get(member.ready)
        except RayError as error:
            self._failed_starts += 1
            if self._failed_starts > MAX_FAILED_STARTS and len(self._slots) == 1:
                raise WorkerGroupError("the processes that run items can't be started") from error
            self._lose(member, error, again=False)
        else:
            self._ready[member.node_id] = member

    def _ended(self, session: Session, ref: "ObjectRef[BatchReport]", batch: _Batch) -> None:
        try:
            report: BatchReport = session.get(ref)
        except RayActorError as error:
            if self._ready.get(batch.member.node_id) is batch.member:
                self._lose(batch.member, error, again=True)
            self._lost(batch, "was lost with its host")
        except RayError as error:
            logger.warning("a batch on node %s is sent again: %s", batch.member.node_id, error)
            self._lost(batch, "could not be run")
        else:
            self._take_in(report, batch)

    def _lost(self, batch: _Batch, how: str) -> None:
        self._take_in(BatchReport("lost", b"", how), batch)

    def _take_in(self, report: BatchReport, batch: _Batch) -> None:
        self._sent[batch.member] -= 1
        self._isolated.discard(batch.member)
        self._refuse_unloadable(report, batch.member.node_id)
        if report.stop == "lost":
            self._pool.check_open()
        ended = ended_items(report, batch.number, batch.member.node_id)
        if (observer := observed.by) is not None:
            seconds, sizes = [end.seconds for end in ended], [len(entry.payload) for entry in batch.entries]
            tell_of_batch(
                observer, batch.member.node_id, self._function.name, batch.sent, report, seconds, sizes
            )
        for entry, end in zip(batch.entries, ended, strict=False):
            self._settle(entry, end)
        self._sizer.observe(len(ended), sum(end.seconds for end in ended))
        rest = batch.entries[len(ended) :]
        if not rest:
            return
        if report.stop == "timeout":
            reason = f"it ran longer than timeout_s={self._limits.timeout_s:g} and was killed"
            self._fail(rest.pop(0), ItemTimeoutError, reason)
        elif report.stop == "crash":
            self._fail(rest.pop(0), ItemCrashedError, f"its process {report.detail}")
        else:
            rest = [entry for entry in rest if self._forgive_loss(entry, report.detail)]
        self._backlog.send_again(rest)

    def _refuse_unloadable(self, report: BatchReport, node_id: str) -> None:
        if report.stop == "unloadable":
            reason = f"{self._function.name} can't be loaded on node {node_id}"
            raise FunctionLoadError(f"{reason}:\n{report.detail}")
        if report.stop == "uninitialized":
            reason = f"the initializer {self._function.initializer_name} failed on node {node_id}"
            raise FunctionLoadError(f"{reason}:\n{report.detail}")

    def _settle(self, entry: Entry, end: Finished) -> None:
        if not end.ok:
            cause, name, message, trace = failure_in(end.payload)
            if cause is not None:
                with suppress(Exception):  # of a class that allows none
                    cause.add_note(f"In the process that ran item {entry.index}:\n{trace}")
            reason = f"{name}: {message}" if cause is not None else f"{name}: {message}\n{trace}"
            self._fail(entry, ItemError, reason, cause, end.seconds)
            return
        try:
            value = pickle.loads(end.payload)
        except Exception as error:  # noqa: BLE001 - a class may fail to unpickle in any way
            self._fail(entry, ItemError, f"its result can't be read back: {error!r}", error, end.seconds)
            return
        self._outcomes.append(ItemOutcome(entry.index, value, attempts=entry.attempts, seconds=end.seconds))

    def _fail(
        self,
        entry: Entry,
        kind: type[ItemError],
        reason: str,
        cause: BaseException | None = None,
        seconds: float = 0.0,
    ) -> None:
        if entry.attempts <= self._limits.retries:
            logger.info("item %d is tried again: %s", entry.index, reason)
            entry.attempts += 1
            self._backlog.send_again([entry])
            return
        error = kind(entry.index, reason, entry.attempts)
        error.__cause__ = cause
        self._outcomes.append(ItemOutcome(entry.index, error=error, attempts=entry.attempts, seconds=seconds))

    def _forgive_loss(self, entry: Entry, how: str) -> bool:
        entry.losses += 1
        if entry.losses <= MAX_LOSSES:
            return True
        error = ItemCrashedError(entry.index, f"its process {how}, {entry.losses} times", entry.attempts)
        self._outcomes.append(ItemOutcome(entry.index, error=error, attempts=entry.attempts))
        return False

    def _refuse(self, index: int, error: Exception) -> None:
        failure = ItemError(index, f"the item can't be pickled: {error}")
        failure.__cause__ = error
        self._outcomes.append(ItemOutcome(index, error=failure))
