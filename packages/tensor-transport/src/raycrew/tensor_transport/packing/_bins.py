"""Sequences into bins of a token budget, and bins onto ranks.

Every algorithm takes time that grows as n log n, not as sequences times bins, and equal lengths are placed
together. The guarantees are those of the literature: first-fit and best-fit decreasing never need more than
11/9 of the optimum plus 6/9 bins (Dósa et al., 2013), the modified form 71/60 (Johnson and Garey, 1985).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport._rows import refuse_special_array
from raycrew.tensor_transport.packing._fitting import ALGORITHMS, Bins, Sizes

__all__ = ["ALGORITHMS", "Packing", "balance", "pack"]

_MOST_TOKENS = 2**31 - 1
"""Sums of as many sequences as fit into memory stay far below 2**63."""

Lengths = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor


@dataclass(frozen=True)
class Packing:
    """Which sequences share a bin.

    Attributes:
        bins: The sequences of each bin, ascending; every sequence is in exactly one.
        loads: Tokens in each bin.
        capacity: The most tokens a bin may hold.
    """

    bins: Bins
    loads: list[int]
    capacity: int

    @property
    def efficiency(self) -> float:
        """Tokens over the room of all bins; 1.0 wastes nothing."""
        return sum(self.loads) / (len(self.bins) * self.capacity) if self.bins else 1.0

    @property
    def lower_bound(self) -> int:
        """No packing has fewer bins."""
        return -(-sum(self.loads) // self.capacity)


def pack(
    lengths: Lengths,
    capacity: int,
    algorithm: str = "modified_first_fit_decreasing",
    *,
    min_bin_count: int = 1,
    bin_count_multiple: int = 1,
    seed: int = 0,
) -> Packing:
    """Put sequences into bins of at most `capacity` tokens.

    Args:
        lengths: Tokens of each sequence.
        capacity: Tokens a bin may hold.
        algorithm: One of `ALGORITHMS`: `first_fit_decreasing`, `modified_first_fit_decreasing` and
            `best_fit_decreasing` pack tightest; `concatenative` keeps neighbours together; `first_fit`
            and `best_fit` take them as they come and `first_fit_shuffle` in random order.
        min_bin_count: At least this many bins.
        bin_count_multiple: The number of bins is a multiple of this, for example of the ranks. Where that
            means more bins than are needed, all are filled a little less, rather than a few hardly at all.
        seed: For `first_fit_shuffle`.

    Raises:
        ValueError: A sequence is longer than a bin, there are fewer sequences than bins are asked for, or the
            algorithm is unknown.

    Examples:
        >>> packing = pack([900, 3000, 1100, 4000], 4096)
        >>> sorted(sorted(each) for each in packing.bins), sorted(packing.loads)
        ([[0, 1], [2], [3]], [1100, 3900, 4000])
    """
    sizes = _checked(lengths, capacity)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown packing algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    if min_bin_count < 1 or bin_count_multiple < 1:
        raise ValueError(f"bin counts are positive, not {min_bin_count} and {bin_count_multiple}")
    if not len(sizes):
        return Packing([], [], capacity)
    bins = ALGORITHMS[algorithm](sizes, capacity, seed)
    count = -(-max(len(bins), min_bin_count) // bin_count_multiple) * bin_count_multiple
    if len(bins) < count:
        bins = _split_up(_less_full(sizes, capacity, algorithm, seed, count) or bins, sizes, count)
    return Packing([sorted(b) for b in bins], [int(sizes[b].sum()) for b in bins], capacity)


def balance(loads: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal bins out to ranks: equally many each, with about equally many tokens.

    The heaviest bins are dealt first, in rounds of one bin per rank, each round's heaviest to the rank with
    the fewest tokens so far; then the ranks with the most and the fewest tokens exchange bins while it helps.

    Args:
        loads: Tokens of each bin; as many bins as a multiple of `ranks`.
        ranks: How many ranks.

    Returns:
        The bins of each rank, heaviest first.

    Raises:
        ValueError: The bins do not divide evenly.
    """
    if ranks < 1 or len(loads) % ranks:
        raise ValueError(
            f"{len(loads)} bins do not divide evenly over {ranks} ranks; pack(bin_count_multiple=...)"
        )
    order = sorted(range(len(loads)), key=lambda b: -loads[b])
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(order), ranks):
        lightest_first = sorted(range(ranks), key=totals.__getitem__)
        for rank, b in zip(lightest_first, order[start : start + ranks], strict=True):
            dealt[rank].append(b)
            totals[rank] += loads[b]
    for _ in range(8 * ranks if order else 0):
        if not _exchange(dealt, totals, loads):
            break
    return dealt


def _exchange(dealt: list[list[int]], totals: list[int], loads: Sequence[int]) -> bool:
    """Swap the two bins that bring the heaviest and the lightest rank closest; False if none does."""
    heavy = max(range(len(totals)), key=totals.__getitem__)
    light = min(range(len(totals)), key=totals.__getitem__)
    gap = totals[heavy] - totals[light]
    giving = np.array([loads[b] for b in dealt[heavy]])
    taking = np.array([loads[b] for b in dealt[light]][::-1])
    below = np.searchsorted(taking, giving - gap / 2, side="right") - 1
    best, give, take = gap, 0, 0
    for neighbour in (below, below + 1):
        position = np.clip(neighbour, 0, len(taking) - 1)
        left = np.abs(gap - 2 * (giving - taking[position]))
        i = int(left.argmin())
        if left[i] < best:
            best, give, take = int(left[i]), i, len(taking) - 1 - int(position[i])
    if best == gap:
        return False
    moved = loads[dealt[heavy][give]] - loads[dealt[light][take]]
    totals[heavy] -= moved
    totals[light] += moved
    dealt[heavy][give], dealt[light][take] = dealt[light][take], dealt[heavy][give]
    for rank in (heavy, light):
        dealt[rank].sort(key=lambda b: -loads[b])
    return True


def _less_full(sizes: Sizes, capacity: int, algorithm: str, seed: int, count: int) -> Bins | None:
    """At most `count` bins of about equal loads, found by packing into smaller ones; None if that fails.

    The search is that of MULTIFIT (Coffman, Garey and Johnson, 1978) in a few fixed steps; what is longer
    than the smaller bins gets a bin of its own.
    """
    fair = -(-int(sizes.sum()) // count)
    for slack in (1.0005, 1.002, 1.01, 1.03, 1.1, 1.2):
        room = int(fair * slack) + 1
        if room >= capacity:
            return None
        others = np.flatnonzero(sizes <= room)
        alone = [[i] for i in np.flatnonzero(sizes > room).tolist()]
        bins = ALGORITHMS[algorithm](sizes[others], room, seed) if len(others) else []
        if len(alone) + len(bins) <= count:
            return alone + [others[b].tolist() for b in bins]
    return None


def _split_up(bins: Bins, sizes: Sizes, count: int) -> Bins:
    """Split the heaviest bins until there are `count`."""
    if len(sizes) < count:
        raise ValueError(
            f"{len(sizes)} sequences can't fill {count} bins; ask for fewer bins or a smaller multiple"
        )
    heap = [(-int(sizes[b].sum()), i) for i, b in enumerate(bins) if len(b) > 1]
    heapq.heapify(heap)
    while len(bins) < count:
        _, i = heapq.heappop(heap)
        halves: Bins = [[], []]
        loads = [0, 0]
        for item in sorted(bins[i], key=lambda item: -sizes[item]):
            lighter = 0 if (loads[0], len(halves[0])) <= (loads[1], len(halves[1])) else 1
            halves[lighter].append(item)
            loads[lighter] += int(sizes[item])
        bins[i] = halves[0]
        bins.append(halves[1])
        for half, load, place in zip(halves, loads, (i, len(bins) - 1), strict=True):
            if len(half) > 1:
                heapq.heappush(heap, (-load, place))
    return bins


def _checked(lengths: Lengths, capacity: int) -> Sizes:
    refuse_special_array(lengths, "lengths")
    array = lengths.detach().cpu().numpy() if isinstance(lengths, torch.Tensor) else np.asarray(lengths)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise ValueError(f"lengths are one dimension of integers, not {array.dtype} of shape {array.shape}")
    if not 1 <= capacity <= _MOST_TOKENS:
        raise ValueError(f"a bin's capacity is positive and at most 2**31 - 1, not {capacity}")
    bad = np.flatnonzero((array < 0) | (array > capacity))
    if len(bad):
        raise ValueError(
            f"sequence {bad[0]} of {array[bad[0]]} tokens does not fit a bin of {capacity} "
            f"({len(bad)} such in all); truncate it or raise the budget"
        )
    return array.astype(np.int64)
