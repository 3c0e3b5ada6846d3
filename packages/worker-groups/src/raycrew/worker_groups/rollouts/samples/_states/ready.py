"""The samples that are ready for one use, in order, by the version that their age counts from. Pure."""

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush

_SLACK = 1024


class Ready:
    """Keys of samples; one that is no longer ready is passed over when its turn comes.

    Args:
        is_there: Whether a key stands for a sample that is ready and of that version.
    """

    def __init__(self, is_there: Callable[[int, int], bool]) -> None:
        self._is_there = is_there
        self._heaps: dict[int, list[int]] = {}
        self._counts: Counter[int] = Counter()
        self._n_keys = self._n_ready = 0

    def push(self, tag: int, key: int) -> None:
        """A sample is ready."""
        heappush(self._heaps.setdefault(tag, []), key)
        self._counts[tag] += 1
        self._n_keys += 1
        self._n_ready += 1

    def leave(self, tag: int) -> None:
        """A sample of that version is not ready any more."""
        self._counts[tag] -= 1
        self._n_ready -= 1
        if not self._counts[tag]:
            del self._counts[tag]
        if self._n_keys > 2 * self._n_ready + _SLACK:
            self._tidy()

    def count(self, floor: int) -> int:
        """How many there are of that version, or a later one."""
        return sum(n for tag, n in self._counts.items() if tag >= floor)

    def below(self, floor: int) -> list[int]:
        """The keys of those that are older, in order."""
        old = [tag for tag in self._counts if tag < floor]
        return sorted(key for tag in old for key in set(self._heaps[tag]) if self._is_there(tag, key))

    def pop(self, n: int, floor: int) -> list[int]:
        """The keys of the first `n` of that version or later ones, which the caller has leave."""
        tops = [(heap[0], tag) for tag, heap in self._heaps.items() if tag >= floor]
        heapify(tops)
        found: list[int] = []
        while len(found) < n and tops:
            key, tag = heappop(tops)
            heap = self._heaps[tag]
            heappop(heap)
            self._n_keys -= 1
            if self._is_there(tag, key) and found[-1:] != [key]:  # one that was pushed twice comes twice
                found.append(key)
            if heap:
                heappush(tops, (heap[0], tag))
            else:
                del self._heaps[tag]
        return found

    def _tidy(self) -> None:
        for tag, heap in list(self._heaps.items()):
            kept = [key for key in set(heap) if self._is_there(tag, key)]
            heapify(kept)
            if kept:
                self._heaps[tag] = kept
            else:
                del self._heaps[tag]
        self._n_keys = sum(map(len, self._heaps.values()))
