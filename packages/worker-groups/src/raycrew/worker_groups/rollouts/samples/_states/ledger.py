"""The states of all samples of a queue: what is there, ready, handed out, and too old. Pure.

Nothing here waits, and time comes in as an argument.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from raycrew.worker_groups.rollouts.samples._states.keys import Keys
from raycrew.worker_groups.rollouts.samples._states.leases import Leases
from raycrew.worker_groups.rollouts.samples._states.order import Order
from raycrew.worker_groups.rollouts.samples._states.ready import Ready
from raycrew.worker_groups.rollouts.samples._states.sample import (
    ALL,
    GOES_ON,
    WHOLE,
    Sample,
    Use,
    is_ready,
    may_become_ready,
    tag_of,
)
from raycrew.worker_groups.rollouts.samples._states.versions import Runs

Stale = Literal["keep", "drop", "rescore"]
_MOST_USES = 64
NO_FLOOR = -1


class Ledger:
    """Samples by their numbers, and for which uses they are ready.

    Args:
        order: In which order they are handed out.
        stale: What becomes of one that is found too old.
        rescored: Columns that such a one loses, to be scored anew.
        keys: What samples were put under; by default, nothing yet.

    Attributes:
        samples: All that are held, by number.
        version: The newest version that anybody has told of.
        next_id: The number of the next sample.
        keys: What samples were put under.
    """

    def __init__(
        self, order: Order, stale: Stale = "keep", rescored: int = 0, keys: Keys | None = None
    ) -> None:
        self.samples: dict[int, Sample] = {}
        self.version = 0
        self.next_id = 0
        self.keys = Keys() if keys is None else keys
        self._gone: list[tuple[Sample, str]] = []
        self._stripped: list[Sample] = []
        self.leases = Leases()
        self._order, self._stale, self._rescored = order, stale, rescored
        self._is_bounded = False  # whether anybody has asked for young samples
        self._ready: dict[Use, tuple[int, Ready]] = {}

    # What comes

    def advance(self, version: int) -> None:
        """There is that version of the weights."""
        self.version = max(self.version, version)

    def numbered(
        self,
        runs: Sequence[Runs],
        mask: int,
        rows: Sequence[list[Any]],
        now: float,
        keys: Sequence[str] | None = None,
    ) -> list[Sample]:
        """New samples, which are not taken yet."""
        names: Sequence[str | None] = [None] * len(runs) if keys is None else keys
        first, self.next_id = self.next_id, self.next_id + len(runs)
        of_samples = enumerate(zip(runs, rows, names, strict=True), first)
        return [
            Sample(i, mask, tag_of(mask, runs), runs, row, now, key=key) for i, (runs, row, key) in of_samples
        ]

    def put(self, samples: Iterable[Sample]) -> None:
        """Take samples that have their numbers."""
        for sample in samples:
            self.samples[sample.id] = sample
            self.next_id = max(self.next_id, sample.id + 1)
            self.advance(max(run.version for run in sample.runs))
            self._refresh(sample)
            self._note_key(sample)

    def _note_key(self, sample: Sample) -> None:
        if sample.key is not None and sample.id > self.keys.newest:  # else it was noted, if perhaps forgotten
            self.keys.note(sample.key, sample.id)

    def clear(self) -> None:
        """Hold nothing any more, and so none of the rows."""
        for held in (self.samples, self._ready, self._gone, self._stripped):
            held.clear()
        self.leases = Leases()

    def mend(self) -> list[Sample]:
        """Find out anew what is ready, and in whose hands, after an operation that was broken off.

        Returns:
            All samples that have rows.
        """
        self._ready.clear()
        self.leases.mend()
        for sample in self.samples.values():
            sample.busy = sample.ready = 0
            self._note_key(sample)
        for use, ids in self.leases:
            for sample in filter(None, map(self.samples.get, ids)):
                sample.busy |= use.claims
        return [*self.samples.values(), *(sample for sample, _ in self._gone)]

    def lacking(self, ids: Iterable[int], columns: int, lease: str | None) -> list[Sample]:
        """Those of some samples that are held, lack columns, and have them added by nobody else.

        Raises:
            SampleLeaseError: They are added on a lease that has ended, or of other samples or columns.
            ValueError: A number was never given to a sample.
        """
        wanted = list(ids)
        if strange := [i for i in wanted if not 0 <= i < self.next_id]:
            raise ValueError(f"there never were samples {strange[:8]} in this queue")
        own = self._own(wanted, columns, lease)
        held = (self.samples[i] for i in dict.fromkeys(wanted) if i in self.samples)
        return [s for s in held if not s.mask & columns and (own or not s.busy & columns)]

    def _own(self, ids: Sequence[int], columns: int, lease: str | None) -> bool:
        if lease is None:
            return False
        self.leases.check(lease, ids, columns)
        return True

    def add(self, samples: Iterable[Sample], columns: int, version: int | None) -> None:
        """Samples have columns more, whose rows are there already."""
        for sample in samples:
            sample.mask |= columns
            if sample.is_rescored and columns & self._rescored:
                self._score(sample, version or 0)
            self._refresh(sample)
        self.advance(version or 0)

    def _score(self, sample: Sample, version: int) -> None:
        sample.scored_by = version if sample.scored_by is None else min(sample.scored_by, version)
        if sample.mask & self._rescored == self._rescored:
            sample.is_rescored = False
            self._retag(sample, max(sample.tag, sample.scored_by))

    def go_on(self, sample: Sample, runs: Runs, mask: int) -> None:
        """A rollout has gone on; its rows are there already."""
        sample.mask, sample.runs = mask, runs
        self._retag(sample, tag_of(mask, runs))
        self._refresh(sample)
        self.advance(runs[-1].version)

    # What goes

    def count(self, use: Use, floor: int) -> int:
        """How many samples of that version or later ones are ready for a use."""
        return self._ready_for(use).count(floor)

    def may_come(self, use: Use, floor: int) -> bool:
        """Whether samples that are held and not ready for a use may become so."""
        return any(
            not is_ready(s, use) and self._may_become_ready(s, use) and self._may_be_young(s, use, floor)
            for s in self.samples.values()
        )

    def _may_become_ready(self, sample: Sample, use: Use) -> bool:
        if may_become_ready(sample, use):
            return True
        return self._is_bounded and not sample.mask & use.adds & ~self._rescored  # parts once they are whole

    def _may_be_young(self, sample: Sample, use: Use, floor: int) -> bool:
        return sample.tag >= floor or (self._stale == "rescore" and use != GOES_ON)

    def take_stale(self, use: Use, floor: int) -> int:
        """Drop or strip samples that are ready for a use, and older, if that is done; how many."""
        self._is_bounded |= floor > NO_FLOOR
        if self._stale == "keep" or floor <= 0:
            return 0
        found = [self.samples[self._order.sample(key)] for key in self._ready_for(use).below(floor)]
        if self._stale == "rescore":
            found = [s for s in found if s.mask & WHOLE and s.mask & self._rescored]  # nobody scores parts
            found = [s for s in found if not s.is_rescored and not s.busy]
        for sample in found:
            if self._stale == "drop":
                self.drop(sample)
            else:
                self._strip(sample)
        return len(found)

    def discard(self, floor: int) -> int:
        """Drop what is older and in nobody's hands, whatever it has and lacks; how many."""
        old = [sample for sample in self.samples.values() if sample.tag < floor and not sample.busy]
        for sample in old:
            self.drop(sample)
        return len(old)

    def drop(self, sample: Sample) -> None:
        """Hold a sample no longer."""
        self._leave(sample, "dropped")

    def _strip(self, sample: Sample) -> None:
        sample.mask &= ~self._rescored
        sample.is_rescored, sample.scored_by = True, None
        self._stripped.append(sample)
        self._refresh(sample)

    def lease(self, name: str, use: Use, n: int, floor: int, until: float) -> list[Sample]:
        """Hand the first `n` out of those that are ready for a use and not older than a version."""
        keys = self._ready_for(use).pop(n, floor)
        taken = [self.samples[self._order.sample(key)] for key in keys]
        for sample in taken:
            sample.busy |= use.claims
            self._refresh(sample)
        if taken:
            self.leases.begin(name, use, (s.id for s in taken), until)
        return taken

    def done(self, name: str, ids: Iterable[int] | None) -> int:
        """Samples were used up: they are held no longer. How many.

        Raises:
            SampleLeaseError: The lease has ended, or they are not of it.
        """
        use = self.leases.get(name).use
        if use.adds:
            return self.give_back(name, ids)
        settled = self.leases.take(name, ids)
        for i in settled:
            if (sample := self.samples.get(i)) is not None:
                self._leave(sample, "consumed")
        return len(settled)

    def give_back(self, name: str, ids: Iterable[int] | None) -> int:
        """Samples are ready again for whatever they were handed out for. How many.

        Raises:
            SampleLeaseError: The lease has ended, or they are not of it.
        """
        use = self.leases.get(name).use
        returned = self.leases.take(name, ids)
        for i in returned:
            if (sample := self.samples.get(i)) is not None:
                sample.busy &= ~use.claims
                self._refresh(sample)
        return len(returned)

    def expire(self, now: float) -> int:
        """Take back what was not settled in time; how many samples."""
        return sum(self.give_back(name, None) for name, _ in self.leases.ended(now))

    def taken_off(self) -> tuple[list[tuple[Sample, str]], list[Sample]]:
        """Samples that are held no longer since this was asked last, and why; and those that lost columns."""
        taken = self._gone, self._stripped
        self._gone, self._stripped = [], []
        return taken

    # Uses

    def _ready_for(self, use: Use) -> Ready:
        known = self._ready.pop(use, None) or self._new_use(use)
        self._ready[use] = known  # the last that was asked for comes last
        return known[1]

    def _new_use(self, use: Use) -> tuple[int, Ready]:
        if len(self._ready) >= _MOST_USES:
            slot, _ = self._ready.pop(next(iter(self._ready)))
            for sample in self.samples.values():
                sample.ready &= ~(1 << slot)
        else:
            slot = len(self._ready)
        bit, ready = 1 << slot, Ready(self._is_there(1 << slot))
        for sample in self.samples.values():
            if is_ready(sample, use):
                sample.ready |= bit
                ready.push(sample.tag, self._order.key(sample.id))
        return slot, ready

    def _is_there(self, bit: int) -> Callable[[int, int], bool]:
        samples, number = self.samples, self._order.sample

        def is_there(tag: int, key: int) -> bool:
            sample = samples.get(number(key))
            return sample is not None and bool(sample.ready & bit) and sample.tag == tag

        return is_there

    def _refresh(self, sample: Sample) -> None:
        """Note for which uses a sample is ready now, after it has changed."""
        for use, (slot, ready) in self._ready.items():
            bit = 1 << slot
            was, now = sample.ready & bit, is_ready(sample, use)
            if now and not was:
                sample.ready |= bit
                ready.push(sample.tag, self._order.key(sample.id))
            elif was and not now:
                sample.ready &= ~bit
                ready.leave(sample.tag)

    def _retag(self, sample: Sample, tag: int) -> None:
        if tag == sample.tag:
            return
        busy, sample.busy = sample.busy, ALL
        self._refresh(sample)  # it leaves as what it was
        sample.tag, sample.busy = tag, busy

    def _leave(self, sample: Sample, why: str) -> None:
        sample.busy = ALL
        self._refresh(sample)
        del self.samples[sample.id]
        self._gone.append((sample, why))
