"""How many items go into a batch, and what is still to be sent. No Ray here."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

TARGET_S = 0.25
"""How long a batch should run: long against the cost of sending one, short against a step.

Sending one costs driver and host a millisecond of CPU time together, and up to twenty where busy items have
taken the processor's caches from them.
"""
LEAST_S = 0.01
"""What a batch should not be shorter than. At the end, processes may be this far apart."""
MAX_BATCH_ITEMS = 4096
MAX_BATCH_BYTES = 4 << 20
GROWTH = 4
SUSPECT_LOSSES = 2
"""From so many losses on, an item runs with nothing else on its host, so that only the guilty is blamed."""


class BatchSizer:
    """Batch sizes from measured item times.

    Args:
        fixed: The size to use always; None measures.
        estimate_s: What an item took in an earlier call, if known.
    """

    def __init__(self, fixed: int | None = None, estimate_s: float | None = None) -> None:
        self._fixed = fixed
        self._largest = 1 if estimate_s is None else MAX_BATCH_ITEMS
        self.estimate_s = estimate_s

    def observe(self, items: int, seconds: float) -> None:
        """Learn from a batch: `items` of it took `seconds` together."""
        if items < 1:
            return
        mean = seconds / items
        known = self.estimate_s
        self.estimate_s = mean if known is None else 0.7 * known + 0.3 * mean
        self._largest = max(self._largest, items)

    def size(self, slots: int, remaining: int | None) -> int:
        """Items of the next batch, for `slots` processes and `remaining` items (None: unknown)."""
        if self._fixed is not None:
            return self._fixed
        if self.estimate_s is None:
            return 1
        each_s = max(self.estimate_s, 1e-7)
        size = min(int(TARGET_S / each_s), GROWTH * self._largest, MAX_BATCH_ITEMS)
        if remaining is not None:
            # Later batches are smaller, so that all processes end at about the same time.
            size = min(size, max(math.ceil(remaining / (2 * slots)), int(LEAST_S / each_s)))
        return max(size, 1)


@dataclass(slots=True)
class Entry:
    """One item on its way: where it stands in the input, its bytes, and how often it was tried or lost."""

    index: int
    payload: bytes
    attempts: int = 1
    losses: int = 0

    @property
    def suspect(self) -> bool:
        """Whether it may be what brings its hosts down."""
        return self.losses >= SUSPECT_LOSSES


class Backlog:
    """Items not yet sent: the source, read as late as possible, and what has to be sent again.

    Args:
        items: The source.
        encode: Makes bytes of an item; what it raises is reported through `on_bad_item`.
        on_bad_item: Called with the index and the exception.
        length: Number of items, if known.
    """

    def __init__(
        self,
        items: Iterator[Any],
        encode: Callable[[Any], bytes],
        on_bad_item: Callable[[int, Exception], None],
        length: int | None,
    ) -> None:
        self._items = items
        self._encode = encode
        self._on_bad_item = on_bad_item
        self._length = length
        self._again: deque[Entry] = deque()
        self._next_index = 0
        self._exhausted = False

    @property
    def remaining(self) -> int | None:
        """Items still to send, None where the source does not say."""
        again = len(self._again)
        if self._exhausted:
            return again
        return None if self._length is None else max(self._length - self._next_index, 0) + again

    @property
    def next_is_suspect(self) -> bool:
        """Whether the next item must have its host for itself."""
        return bool(self._again) and self._again[0].suspect

    def send_again(self, entries: list[Entry]) -> None:
        """Put entries back, before anything new."""
        self._again.extendleft(reversed(entries))

    def take(self, count: int) -> list[Entry]:
        """Up to `count` entries, fewer where they are large; an empty list when there is nothing more."""
        batch: list[Entry] = []
        size_bytes = 0
        while len(batch) < count:
            entry = self._pop()
            if entry is None:
                break
            alone = entry.losses > 0  # it may be what brought its host down: no neighbours again
            if batch and (alone or size_bytes + len(entry.payload) > MAX_BATCH_BYTES):
                self._again.appendleft(entry)
                break
            batch.append(entry)
            size_bytes += len(entry.payload)
            if alone:
                break
        return batch

    def _pop(self) -> Entry | None:
        if self._again:
            return self._again.popleft()
        while not self._exhausted:
            try:
                item = next(self._items)
            except StopIteration:
                self._exhausted = True
                break
            index, self._next_index = self._next_index, self._next_index + 1
            try:
                return Entry(index, self._encode(item))
            except Exception as error:  # noqa: BLE001 - any object may refuse to be pickled in its own way
                self._on_bad_item(index, error)
        return None
