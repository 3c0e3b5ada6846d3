"""What is done with the samples of a queue. Nothing here waits."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from raycrew.worker_groups.errors import (
    SampleQueueEndedError,
    SampleQueueError,
)
from raycrew.worker_groups.rollouts.samples._asking import Columns, Handed, Wanted, only, use_of
from raycrew.worker_groups.rollouts.samples._keeping.operations import Operations
from raycrew.worker_groups.rollouts.samples._keeping.reasons import in_vain, why_not
from raycrew.worker_groups.rollouts.samples._keeping.tally import SampleStats, ages, stats_of
from raycrew.worker_groups.rollouts.samples._options import QueueOptions
from raycrew.worker_groups.rollouts.samples._states import (
    NO_FLOOR,
    WHOLE,
    Use,
    extended,
    first_runs,
)
from raycrew.worker_groups.rollouts.samples._storage import size_of

logger = logging.getLogger(__name__)

_MOST_WITHDRAWN = 256


class Keeper(Operations):
    """The samples of one queue.

    An operation that is not possible now, but may be later, gives None. Thread-safe.

    Args:
        options: The queue's.
        clock: The monotonic clock.
        tell: Called with what has happened, by name and how often, now and then.
    """

    def __init__(
        self, options: QueueOptions, clock: Callable[[], float], tell: Callable[[Mapping[str, float]], None]
    ) -> None:
        super().__init__(options, clock, tell)
        self._withdrawn: deque[str] = deque(maxlen=_MOST_WITHDRAWN)
        self._is_ended = self._has_warned = False

    def put(
        self,
        columns: Columns,
        version: int,
        lengths: Sequence[int] | None,
        n: int,
        *,
        is_whole: bool,
        keys: Sequence[str] | None = None,
        ticket: str = "",
    ) -> list[int] | None:
        """Take new samples; None where there is no room, or others wait for it before."""
        with self._operation(is_change=False):
            self._check_wanted(ticket)
            ids: list[int | None] = [None] * n if keys is None else self._keys.ids_of(keys)
            fresh = [i for i, known in enumerate(ids) if known is None]
            if len(fresh) < n:
                n, (columns, lengths) = len(fresh), only(fresh, columns, lengths)
            if self._is_ended and fresh:
                raise SampleQueueEndedError(f"{self._options.name} has ended: nothing can be put any more")
            if self._options.max_samples is not None and n > self._options.max_samples:
                raise ValueError(f"{n} samples at once are more than max_samples={self._options.max_samples}")
            self._ledger.advance(version)
            if fresh and not self._room.takes(n, size_of(columns.values()), ticket, self._clock()):
                self._is_changed, self._is_full = self._is_changed or not self._is_full, True
                return None
            mask = self._options.mask_of(list(columns)) | (WHOLE if is_whole else 0)
            kept = self._table.kept(columns, range(n))
            rows = [self._table.row(of_sample) for of_sample in kept]
            names = None if keys is None else [keys[i] for i in fresh]
            new = self._ledger.numbered(first_runs(version, lengths, n), mask, rows, self._clock(), names)
            self._note(partial(self._rows.came, new, self._table.positions(columns), is_new=True))
            self._ledger.put(new)
            self._tally["produced"] += n
            self._is_changed = True
            for i, sample in zip(fresh, new, strict=True):
                ids[i] = sample.id
            return ids  # type: ignore[return-value]

    def known(self, keys: Sequence[str]) -> list[str]:
        """Those of some keys that are remembered."""
        with self._operation(is_change=False):
            return [key for key in keys if key in self._keys]

    def add(self, ids: Sequence[int], columns: Columns, version: int | None, lease: str | None) -> list[int]:
        """Add columns to samples; the numbers of those that did not take them."""
        with self._operation():
            mask = self._options.mask_of(list(columns))
            samples = self._ledger.lacking(ids, mask, lease)
            position = {sample: i for i, sample in enumerate(ids)}
            kept = self._table.kept(columns, [position[sample.id] for sample in samples])
            for sample, of_sample in zip(samples, kept, strict=True):
                self._table.fill(sample, of_sample)
            self._ledger.add(samples, mask, version)
            self._note(partial(self._rows.came, samples, self._table.positions(columns)))
            if lease is not None:
                self._ledger.give_back(lease, ids)
            taken = {sample.id for sample in samples}
            return [i for i in ids if i not in taken]

    def go_on(
        self,
        ids: Sequence[int],
        columns: Columns,
        version: int,
        lengths: Sequence[int],
        lease: str,
        *,
        is_whole: bool,
    ) -> list[int]:
        """Put rollouts that have gone on in place of their parts; the numbers of those that are gone."""
        with self._operation():
            self._ledger.leases.check(lease, ids, WHOLE)
            mask = self._options.mask_of(list(columns)) | (WHOLE if is_whole else 0)
            held = [(i, s) for i, s in enumerate(map(self._ledger.samples.get, ids)) if s is not None]
            runs = [extended(sample.runs, version, lengths[i]) for i, sample in held]
            kept = self._table.kept(columns, [i for i, _ in held])
            for (_, sample), of_sample, rows in zip(held, runs, kept, strict=True):
                self._table.fill(sample, rows)
                self._ledger.go_on(sample, of_sample, sample.mask | mask)
            self._note(partial(self._rows.came, [s for _, s in held], self._table.positions(columns)))
            self._ledger.give_back(lease, ids)
            there = {sample.id for _, sample in held}
            return [i for i in ids if i not in there]

    def get(self, wanted: Wanted) -> Handed | None:
        """Hand samples out; None where there are not enough."""
        with self._operation(is_change=False):
            self._check_wanted(wanted.lease)
            self._ledger.advance(wanted.version)
            use, floor = use_of(self._options, wanted), self._floor_of(wanted.max_staleness)
            self._ledger.take_stale(use, floor)
            self._room.is_short = not self._are_enough(wanted, use, floor)
            if self._room.is_short:
                return None
            until = self._clock() + wanted.lease_s
            taken = self._ledger.lease(wanted.lease, use, wanted.n, floor, until)
            try:
                handed = self._table.handed(taken, wanted.columns, self._ledger.version)
            except OSError:
                self._ledger.give_back(wanted.lease, None)
                raise
            if not use.adds:
                self._tally.update(ages(taken, self._ledger.version, self._clock()))
            return handed

    def done(self, lease: str, ids: Sequence[int] | None) -> int:
        """Samples were used up; how many."""
        with self._operation():
            return self._ledger.done(lease, ids)

    def give_back(self, lease: str, ids: Sequence[int] | None) -> int:
        """Samples are to be handed out again; how many."""
        with self._operation():
            n = self._ledger.give_back(lease, ids)
            self._tally["returned"] += n
            return n

    def withdraw(self, who: str) -> int:
        """Give a lease back that nobody has waited for, if there is one; else do what was asked no more.

        Args:
            who: The lease of a get, or the ticket of a put.
        """
        with self._operation(is_change=False):
            if who in self._ledger.leases:
                self._is_changed = True
                return self._ledger.give_back(who, None)
            self._withdrawn.append(who)  # it may wait still, or have been overtaken
            self._is_changed |= self._room.leave(who)
            return 0

    def _check_wanted(self, who: str) -> None:
        if who in self._withdrawn:
            raise SampleQueueError("whoever asked for this does not wait for it any more")

    def renew(self, lease: str, lease_s: float) -> bool:
        """Have a lease last so long from now on."""
        with self._operation():
            self._ledger.leases.renew(lease, self._clock() + lease_s)
            return True

    def advance(self, version: int) -> int:
        """There is that version of the weights; which is the newest."""
        with self._operation():
            self._ledger.advance(version)
            return self._ledger.version

    def discard(self, max_staleness: int) -> int:
        """Drop what is older and in nobody's hands, whatever it has and lacks; how many."""
        with self._operation():
            return self._ledger.discard(self._floor_of(max_staleness))

    def end(self) -> bool:
        """Nothing more is put."""
        with self._operation():
            self._is_ended = True
            return True

    def stats(self) -> SampleStats:
        """What is held, and what has happened."""
        with self._operation(is_change=False):
            return stats_of(self._ledger, self._rows.in_memory_bytes, self._rows.on_disk_bytes, self._tally)

    def why_not(self, operation: str, arguments: Mapping[str, Any]) -> str:
        """Why an operation is not possible now."""
        stats = self.stats()
        with self._lock:
            return why_not(self._options, self._ledger, self._room, stats, operation, arguments)

    def _floor_of(self, max_staleness: int | None) -> int:
        return NO_FLOOR if max_staleness is None else max(0, self._ledger.version - max_staleness)

    def _are_enough(self, wanted: Wanted, use: Use, floor: int) -> bool:
        ready = self._ledger.count(use, floor)
        if self._is_full and ready < wanted.at_least:
            if ready and use.adds:
                return True  # those who take samples out may wait for these, and those who put for them
            if not use.adds:
                self._warn(wanted, use, floor, ready)
        if ready >= wanted.at_least or not self._is_ended or self._ledger.may_come(use, floor):
            return ready >= wanted.at_least
        if not ready:
            raise SampleQueueEndedError(f"{self._options.name} has ended, and has no more such samples")
        return True

    def _warn(self, wanted: Wanted, use: Use, floor: int, ready: int) -> None:
        """Say once, where no time limit does, that somebody may wait for ever."""
        if not (self._has_warned or self._ledger.leases or self._ledger.may_come(use, floor)):
            self._has_warned = True
            logger.warning("%s", in_vain(self._options, wanted, ready, len(self._ledger.samples)))
