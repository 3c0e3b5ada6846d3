"""Which rows of which shards, in which order: pure arithmetic on runs of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from raycrew.tensor_transport._rows.indexing import Rows

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ShardRows:
    """The rows of one shard that a view needs, and where they go in the result.

    `rows` and `positions` are slices where they are unbroken. `repeats` says, for each position, which of
    `rows` goes there, where a row is needed more than once.
    """

    shard: int
    rows: Rows
    positions: Rows
    repeats: Ints | None = None


class RowView:
    """A sequence of rows, kept as runs of (shard, first row, number of rows) in order.

    A whole shard is one run, an arbitrary order at worst one run per row: 24 bytes each, in one array.
    """

    __slots__ = ("_ends", "_runs")

    def __init__(self, runs: Ints) -> None:
        self._runs = runs
        self._ends = np.cumsum(runs[:, 2])

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Self:
        """All rows of shards of these sizes, one after another."""
        table = [(shard, 0, size) for shard, size in enumerate(sizes) if size]
        return cls(np.array(table, dtype=np.int64).reshape(-1, 3))

    @property
    def runs(self) -> Ints:
        """(shard, first row, number of rows) of each run."""
        return self._runs

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._runs,)

    def take(self, rows: Rows) -> Self:
        """Some rows, in the order of `rows` (normalised by `normalize_rows`)."""
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._between(start, max(start, stop))
            rows = np.arange(start, stop, step)
        run = np.searchsorted(self._ends, rows, side="right")
        into = rows - (self._ends[run] - self._runs[run, 2])
        return type(self)(_compress(self._runs[run, 0], self._runs[run, 1] + into))

    def take_ranges(self, starts: Ints, lengths: Ints) -> Self:
        """Several unbroken ranges of rows, one after another; no row is written out."""
        starts, stops = starts[lengths > 0], (starts + lengths)[lengths > 0]
        first = np.searchsorted(self._ends, starts, side="right")
        pieces = np.searchsorted(self._ends, stops, side="left") - first + 1
        run = np.repeat(first - np.cumsum(pieces) + pieces, pieces) + np.arange(pieces.sum())
        opens = self._ends[run] - self._runs[run, 2]
        begin = np.maximum(np.repeat(starts, pieces), opens)
        end = np.minimum(np.repeat(stops, pieces), self._ends[run])
        return type(self)(
            _joined(np.stack([self._runs[run, 0], self._runs[run, 1] + begin - opens, end - begin], axis=1))
        )

    def merged(self) -> Self:
        """The same rows with as few runs as there can be."""
        return type(self)(_joined(self._runs))

    def repeat(self, times: int) -> Self:
        """Each row `times` times in a row."""
        return self.take(np.repeat(np.arange(len(self)), times))

    def renumbered(self, table: Sequence[int] | Ints) -> Self:
        """The same rows, of shards numbered by `table[old]`."""
        runs = self._runs.copy()
        runs[:, 0] = np.asarray(table, dtype=np.int64)[runs[:, 0]]
        return type(self)(runs)

    def used(self) -> tuple[list[int], Self]:
        """The shards that are needed, in order of number, and the view renumbered to them."""
        shards, inverse = np.unique(self._runs[:, 0], return_inverse=True)
        runs = self._runs.copy()
        runs[:, 0] = inverse
        return shards.tolist(), type(self)(runs)

    @classmethod
    def concat(cls, views: Sequence[Self]) -> Self:
        """The rows of several views, whose shards are numbered alike."""
        return cls(np.concatenate([view.runs for view in views]))

    def by_shard(self) -> list[ShardRows]:
        """What each shard has to give; a row that is needed twice is named once."""
        starts = self._ends - self._runs[:, 2]
        if len(self._runs) == 1:
            return [_one_run(self._runs[0], 0)]
        order = np.argsort(self._runs[:, 0], kind="stable")
        breaks = np.flatnonzero(np.diff(self._runs[order, 0])) + 1
        return [
            _one_run(self._runs[members[0]], int(starts[members[0]]))
            if len(members) == 1
            else _several_runs(self._runs[members], starts[members])
            for members in np.split(order, breaks)
            if len(members)
        ]

    def _between(self, start: int, stop: int) -> Self:
        if start == stop:
            return type(self)(self._runs[:0])
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        runs = self._runs[first : last + 1].copy()
        runs[-1, 2] -= self._ends[last] - stop
        skipped = start - (self._ends[first] - self._runs[first, 2])
        runs[0, 1] += skipped
        runs[0, 2] -= skipped
        return type(self)(runs)


def _compress(shard: Ints, row: Ints) -> Ints:
    """Runs from (shard, row) pairs."""
    if not len(row):
        return np.empty((0, 3), dtype=np.int64)
    breaks = np.flatnonzero((np.diff(shard) != 0) | (np.diff(row) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    lengths = np.diff(np.concatenate([starts, [len(row)]]))
    return np.stack([shard[starts], row[starts], lengths], axis=1)


def _joined(runs: Ints) -> Ints:
    """The same rows with runs that follow each other made one."""
    if len(runs) < 2:
        return runs
    follows = (np.diff(runs[:, 0]) == 0) & (runs[1:, 1] == runs[:-1, 1] + runs[:-1, 2])
    starts = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    return np.stack([runs[starts, 0], runs[starts, 1], np.add.reduceat(runs[:, 2], starts)], axis=1)


def _one_run(run: Ints, position: int) -> ShardRows:
    shard, row, length = run.tolist()
    return ShardRows(shard, slice(row, row + length), slice(position, position + length))


def _several_runs(runs: Ints, starts: Ints) -> ShardRows:
    """What one shard gives in several runs, written out row by row."""
    lengths = runs[:, 2]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows = np.repeat(runs[:, 1], lengths) + within
    where = _as_slice(np.repeat(starts, lengths) + within)
    unique, inverse = np.unique(rows, return_inverse=True)
    if len(unique) < len(rows):
        return ShardRows(int(runs[0, 0]), _as_slice(unique), where, inverse)
    return ShardRows(int(runs[0, 0]), _as_slice(rows), where)


def _as_slice(rows: Ints) -> Rows:
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows
