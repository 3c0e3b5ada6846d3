"""The rows of a queue's samples by column, wherever they are kept."""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any

from raycrew.worker_groups.rollouts.samples._asking import Columns, Handed
from raycrew.worker_groups.rollouts.samples._options import QueueOptions
from raycrew.worker_groups.rollouts.samples._states import Keys, Sample
from raycrew.worker_groups.rollouts.samples._storage import DurableRows, Row, Rows, SpillingRows


def rows_of(options: QueueOptions, keys: Keys) -> Rows:
    """What keeps the rows of a queue, as its options say; keys that it has on disk are noted.

    Raises:
        SampleJournalError: See `SampleQueue`.
        OSError: See `SampleQueue`.
    """
    if options.directory is not None:
        return DurableRows(
            options.max_bytes, options.directory, options.columns, is_synced=options.fsync, keys=keys
        )
    if options.spill:
        return SpillingRows(options.max_bytes, None if options.spill is True else options.spill)
    return Rows(options.max_bytes)


class Table:
    """Puts rows where they are kept, and gets them from there.

    Args:
        options: The queue's.
        rows: What keeps them.
    """

    def __init__(self, options: QueueOptions, rows: Rows) -> None:
        self._options, self._rows = options, rows
        self._index = {name: i for i, name in enumerate(options.columns)}

    def positions(self, columns: Iterable[str]) -> list[int]:
        """Where columns are among a sample's rows."""
        return [self._index[name] for name in columns]

    def kept(self, columns: Columns, samples: Sequence[int]) -> list[dict[int, Any]]:
        """What stands for the rows at some positions in columns, by position among a sample's rows.

        Raises:
            OSError: There is no room on disk; nothing is kept.
        """
        kept: list[dict[int, Any]] = [{} for _ in samples]
        try:
            for name, rows in columns.items():
                for of_sample, position in zip(kept, samples, strict=True):
                    of_sample[self._index[name]] = self._rows.keep(rows[position])
        except BaseException:
            for of_sample in kept:
                self._rows.free(of_sample.values())
            raise
        return kept

    def row(self, kept: Mapping[int, Any]) -> list[Any]:
        """The rows of a new sample."""
        return [kept.get(i) for i in range(len(self._index))]

    def fill(self, sample: Sample, kept: Mapping[int, Any]) -> None:
        """Give a sample rows, perhaps in place of others."""
        for i, row in kept.items():
            self._replace(sample, i, row)

    def clear(self, samples: Iterable[Sample], columns: Sequence[str]) -> None:
        """Take rows from samples."""
        for sample in samples:
            for i in self.positions(columns):
                self._replace(sample, i, None)

    def _replace(self, sample: Sample, position: int, row: Any) -> None:
        old, sample.rows[position] = sample.rows[position], row
        self._rows.free([old])  # only now: a sample that is held has no row that is gone

    def handed(self, samples: Sequence[Sample], columns: Sequence[str] | None, version: int) -> Handed:
        """Samples with the rows of some columns, or of all that each of them has.

        Raises:
            OSError: They can't be read.
        """
        there = reduce(and_, (sample.mask for sample in samples), self._options.every)
        rows = self.read(samples, self._options.names_of(there) if columns is None else columns)
        behind = [max(0, version - sample.tag) for sample in samples]
        return Handed([s.id for s in samples], [s.runs for s in samples], behind, rows)

    def read(self, samples: Sequence[Sample], columns: Iterable[str]) -> dict[str, list[Row]]:
        """The rows of samples that have all of these columns.

        Raises:
            OSError: They can't be read.
        """
        read = self._rows.read
        return {name: [read(s.rows[i]) for s in samples] for name in columns for i in [self._index[name]]}
