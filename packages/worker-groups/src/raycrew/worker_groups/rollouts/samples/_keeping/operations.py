"""One operation on a queue at a time: what is late before it, what is gone after it, and who hears of it."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from raycrew.worker_groups.errors import SampleJournalError, SampleQueueClosedError
from raycrew.worker_groups.rollouts.samples._keeping.room import Room
from raycrew.worker_groups.rollouts.samples._keeping.table import Table, rows_of
from raycrew.worker_groups.rollouts.samples._options import QueueOptions
from raycrew.worker_groups.rollouts.samples._states import Keys
from raycrew.worker_groups.rollouts.samples._storage import Standing


class Operations:
    """Ledger and rows of one queue behind one lock. Thread-safe.

    Args:
        options: The queue's.
        clock: The monotonic clock.
        tell: Called with what has happened, by name and how often, now and then.
    """

    def __init__(
        self, options: QueueOptions, clock: Callable[[], float], tell: Callable[[Mapping[str, float]], None]
    ) -> None:
        self._options, self._clock, self._tell = options, clock, tell
        self._keys = Keys(options.max_keys)
        self._ledger = options.ledger(self._keys)
        self._rows = rows_of(options, self._keys)
        self._table = Table(options, self._rows)
        self._room = Room(options, self._ledger, self._rows)
        self._tally: Counter[str] = Counter()
        self._tally_before: Counter[str] = Counter()  # told of by an earlier process
        self._is_closed = self._is_changed = self._is_torn = self._is_full = False
        self._broken: SampleJournalError | None = None
        self._lock = threading.RLock()
        self._listeners: dict[object, Callable[[], object]] = {}
        self._recover()

    def close(self) -> None:
        """Hold nothing any more; idempotent."""
        with self._lock:
            self._is_closed = True
            self._rows.close()
            self._ledger.clear()
        self._notify()

    def listen(self, key: object, listener: Callable[[], object]) -> None:
        """Call a function after each change, until `leave`; it must not wait."""
        with self._lock:
            self._listeners[key] = listener

    def leave(self, key: object, ticket: str | None = None) -> None:
        """Call it no more; and want no room any more."""
        with self._lock:
            self._listeners.pop(key, None)
            if not self._room.leave(ticket):
                return
        self._notify()

    def next_end_s(self) -> float:
        """Seconds until a lease ends, after which more may be possible."""
        with self._lock:
            end = self._ledger.leases.next_end()
            return float("inf") if end is None else max(0.0, end - self._clock())

    @contextmanager
    def _operation(self, *, is_change: bool = True) -> Iterator[None]:
        """Take back what is late before, clear away what is gone after, and tell."""
        is_heard = True
        try:
            with self._lock:
                self._begin()
                version, expired = self._ledger.version, self._ledger.expire(self._clock())
                self._tally["returned"] += expired
                self._is_changed = is_change or bool(expired)
                try:
                    yield
                except OSError as error:
                    raise SampleJournalError(
                        f"{self._options.name} can't read or write what it has on disk: {error}"
                    ) from error
                finally:
                    is_heard = self._clear() or self._is_changed or self._ledger.version > version
                    self._note(lambda: None)
                    self._tell(self._tally - self._tally_before)
                self._is_torn = False
        finally:
            if is_heard or self._is_closed:
                self._notify()

    def _begin(self) -> None:
        if self._is_closed:
            raise self._broken or SampleQueueClosedError(f"{self._options.name} was closed")
        if self._is_torn:
            self._rows.mend(self._ledger.mend())
        self._is_torn = True  # until all is done: a Ctrl-C may break it off between any two lines

    def _clear(self) -> bool:
        """Give up rows of samples that are gone, and columns that are to be scored anew."""
        gone, stripped = self._ledger.taken_off()
        self._is_full = self._is_full and not gone
        self._table.clear(stripped, self._options.rescored)
        for sample, _ in gone:
            self._rows.free(sample.rows)
        self._note(partial(self._rows.lost_columns, stripped))
        self._note(partial(self._rows.went, gone, self._ledger.samples))
        self._tally.update(Counter(why for _, why in gone))
        self._tally["rescored"] += len(stripped)
        return bool(gone or stripped)

    def _note(self, write: Callable[[], None]) -> None:
        """Have something written down; what can't be leaves a queue that nobody may rely on."""
        if self._broken is not None:
            return
        try:
            self._rows.stands(Standing(self._ledger.version, self._ledger.next_id, dict(self._tally)))
            write()
        except OSError as error:
            self._is_closed = True
            self._rows.close()
            self._broken = SampleJournalError(
                f"{self._options.name} can't write to {self._options.directory} ({error}), "
                "and is closed: what was written before can be opened again"
            )
            raise self._broken from error

    def _notify(self) -> None:
        for listener in list(self._listeners.values()):
            listener()

    def _recover(self) -> None:
        samples, standing = self._rows.recovered()
        for sample in samples:
            sample.born = self._clock()
        self._ledger.put(samples)
        self._ledger.next_id = max(self._ledger.next_id, standing.next_id)
        self._ledger.advance(standing.version)
        self._tally_before.update(standing.tally)
        self._tally.update(standing.tally)
