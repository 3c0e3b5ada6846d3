"""Algorithms that put sizes into bins of one capacity, each in time that grows as n log n."""

import itertools
import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

Sizes = npt.NDArray[np.int64]
Bins = list[list[int]]
Run = tuple[int, list[int]]


class _Shelf:
    """Items under integer keys; the nearest key below or above is found in logarithmic time."""

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self._items: dict[int, list[int]] = {key: items[::-1] for key, items in runs}
        self.keys = sorted(self._items)

    def push(self, key: int, item: int) -> None:
        if key in self._items:
            self._items[key].append(item)
        else:
            self._items[key] = [item]
            insort(self.keys, key)

    def pop_at_least(self, key: int) -> tuple[int, int] | None:
        """The smallest key that is not below, with one item of it."""
        i = bisect_left(self.keys, key)
        return self._pop(i) if i < len(self.keys) else None

    def pop_at_most(self, key: int) -> tuple[int, int] | None:
        """The largest key that is not above, with one item of it."""
        i = bisect_right(self.keys, key)
        return self._pop(i - 1) if i else None

    def pop_smallest_if_two_fit(self, limit: int) -> tuple[int, int] | None:
        """The smallest key with one item, if it and the next smallest item together are not above `limit`."""
        if not self.keys:
            return None
        first = self.keys[0]
        second = first if len(self._items[first]) > 1 else next(iter(self.keys[1:2]), limit + 1)
        return self._pop(0) if first + second <= limit else None

    def runs(self) -> Iterator[Run]:
        """Everything that is left, largest key first."""
        for key in reversed(self.keys):
            yield key, self._items[key][::-1]

    def _pop(self, i: int) -> tuple[int, int]:
        key = self.keys[i]
        items = self._items[key]
        item = items.pop()
        if not items:
            del self._items[key], self.keys[i]
        return key, item


def _first_fit(runs: Iterable[Run], capacity: int, most_bins: int) -> Bins:
    """Each sequence into the first bin with room, found in a tree of the most room among a range of bins."""
    leaves = 1 << max(most_bins - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)
    bins: Bins = [[] for _ in range(leaves)]
    for length, items in runs:
        start = 0
        while start < len(items):
            node = 1
            while node < leaves:
                node *= 2
                if room[node] < length:
                    node += 1
            fitting = room[node] // length if length else len(items)
            bins[node - leaves] += items[start : start + fitting]
            room[node] -= length * min(fitting, len(items) - start)
            start += fitting
            node //= 2
            while node:
                most = max(room[2 * node], room[2 * node + 1])
                if room[node] == most:
                    break
                room[node] = most
                node //= 2
    return [b for b in bins if b]


def _best_fit(runs: Iterable[Run], capacity: int) -> Bins:
    """Each sequence into the fullest bin with room."""
    bins: Bins = []
    by_room = _Shelf()
    for length, items in runs:
        start = 0
        while start < len(items):
            found = by_room.pop_at_least(length)
            room, b = found or (capacity, len(bins))
            if found is None:
                bins.append([])
            fitting = min(room // length, len(items) - start) if length else len(items)
            bins[b] += items[start : start + fitting]
            by_room.push(room - length * fitting, b)
            start += fitting
    return bins


def _modified_first_fit_decreasing(sizes: Sizes, capacity: int) -> Bins:
    """Large sequences (over 1/2) open bins; then medium ones (over 1/3), small ones in pairs, the rest."""
    runs = list(_decreasing(sizes))
    large = [(length, item) for length, items in runs if 2 * length > capacity for item in items]
    bins: Bins = [[item] for _, item in large]
    room = [capacity - length for length, _ in large]
    medium = _Shelf(run for run in runs if 3 * run[0] > capacity >= 2 * run[0])
    small = _Shelf(run for run in runs if 6 * run[0] > capacity >= 3 * run[0])
    tiny = [run for run in runs if 6 * run[0] <= capacity]
    without_medium = [b for b in range(len(bins)) if not _place_largest(medium, b, bins, room)]
    for b in reversed(without_medium):
        if found := small.pop_smallest_if_two_fit(room[b]):
            _put(found, b, bins, room)
            _place_largest(small, b, bins, room)
    rest = _Shelf([*medium.runs(), *small.runs(), *tiny])
    for b in range(len(bins)):
        while _place_largest(rest, b, bins, room):
            pass
    left = list(rest.runs())
    return bins + _first_fit(left, capacity, _most_bins(sum(k * len(items) for k, items in left), capacity))


def _place_largest(shelf: _Shelf, b: int, bins: Bins, room: list[int]) -> bool:
    """Put the largest sequence that still fits into a bin; False if none does."""
    found = shelf.pop_at_most(room[b])
    if found is None:
        return False
    _put(found, b, bins, room)
    return True


def _put(found: tuple[int, int], b: int, bins: Bins, room: list[int]) -> None:
    length, item = found
    bins[b].append(item)
    room[b] -= length


def _concatenative(sizes: Sizes, capacity: int) -> Bins:
    """Sequences in their order; a new bin when the current one is full."""
    ends = np.cumsum(sizes)
    bins: Bins = []
    start = used = 0
    while start < len(sizes):
        stop = int(np.searchsorted(ends, used + capacity, side="right"))
        bins.append(list(range(start, stop)))
        start, used = stop, int(ends[stop - 1])
    return bins


def _decreasing(sizes: Sizes) -> Iterator[Run]:
    """Runs of equal lengths, longest first; sequences of equal length in their order."""
    order = np.argsort(-sizes, kind="stable")
    ordered = sizes[order]
    cuts = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(order)]
    items = order.tolist()
    for start, stop in itertools.pairwise(cuts):
        yield int(ordered[start]), items[start:stop]


def _as_they_come(sizes: Sizes, order: Iterable[int] | None = None) -> Iterator[Run]:
    lengths = sizes.tolist()
    return ((lengths[i], [i]) for i in (range(len(lengths)) if order is None else order))


def _shuffled(sizes: Sizes, seed: int) -> Iterator[Run]:
    order = list(range(len(sizes)))
    random.Random(seed).shuffle(order)
    return _as_they_come(sizes, order)


def _most_bins(tokens: int, capacity: int) -> int:
    """First-fit never uses more: of two bins, the later one's first sequence did not fit the earlier."""
    return 2 * -(-tokens // capacity) + 1


def _room_for(sizes: Sizes, capacity: int) -> int:
    return min(_most_bins(int(sizes.sum()), capacity), len(sizes))


ALGORITHMS: dict[str, Callable[[Sizes, int, int], Bins]] = {
    "concatenative": lambda sizes, capacity, _: _concatenative(sizes, capacity),
    "first_fit": lambda sizes, capacity, _: _first_fit(
        _as_they_come(sizes), capacity, _room_for(sizes, capacity)
    ),
    "first_fit_shuffle": lambda sizes, capacity, seed: _first_fit(
        _shuffled(sizes, seed), capacity, _room_for(sizes, capacity)
    ),
    "first_fit_decreasing": lambda sizes, capacity, _: _first_fit(
        _decreasing(sizes), capacity, _room_for(sizes, capacity)
    ),
    "modified_first_fit_decreasing": lambda sizes, capacity, _: _modified_first_fit_decreasing(
        sizes, capacity
    ),
    "best_fit": lambda sizes, capacity, _: _best_fit(_as_they_come(sizes), capacity),
    "best_fit_decreasing": lambda sizes, capacity, _: _best_fit(_decreasing(sizes), capacity),
}
