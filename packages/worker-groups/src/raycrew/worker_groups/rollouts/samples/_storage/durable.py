"""Rows that outlive the process, with the samples that they are of."""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from raycrew.worker_groups.rollouts.samples._states import Keys, Sample
from raycrew.worker_groups.rollouts.samples._storage.files import SEGMENT_BYTES
from raycrew.worker_groups.rollouts.samples._storage.journal import Journal
from raycrew.worker_groups.rollouts.samples._storage.rows import Place, Recovered, Rows, Standing

_SLACK_BYTES = 4 * SEGMENT_BYTES


class DurableRows(Rows):
    """Writes all rows to a journal, and keeps them in memory besides as far as they fit.

    Args:
        max_bytes: Most bytes in memory.
        directory: Where the journal is.
        columns: Names of the columns.
        is_synced: See `Journal`.
        keys: See `Journal`.

    Raises:
        SampleJournalError: See `Journal`.
        OSError: It can't be read or written.
    """

    overflows = True

    def __init__(
        self,
        max_bytes: int | None,
        directory: str | os.PathLike[str],
        columns: Sequence[str],
        *,
        is_synced: bool,
        keys: Keys,
    ) -> None:
        super().__init__(max_bytes)
        self._journal = Journal(Path(directory), columns, is_synced=is_synced, keys=keys)

    def _at(self, place: Place) -> bytes:
        return self._journal.read(place)

    def recovered(self) -> Recovered:
        """See `Rows`."""
        samples, self._journal.samples = self._journal.samples, {}
        found = [samples[i] for i in sorted(samples)]
        self.on_disk_bytes += sum(row.size for s in found for row in s.rows if isinstance(row, Place))
        return Recovered(found, self._journal.standing)

    def came(self, samples: Sequence[Sample], columns: Sequence[int], *, is_new: bool = False) -> None:
        """See `Rows`."""
        if samples:
            self._write(samples, columns, is_new=is_new)

    def _write(self, samples: Sequence[Sample], columns: Sequence[int], **how: bool) -> None:
        rows = [self._bytes(sample.rows[i]) for sample in samples for i in columns]
        places = self._journal.write(samples, columns, rows, **how)
        for sample in samples:
            for i in columns:
                sample.rows[i] = self._put_away(sample.rows[i], next(places))

    def _bytes(self, row: Any) -> bytes:
        return self._at(row) if isinstance(row, Place) else row

    def _put_away(self, row: Any, place: Place) -> bytes | Place:
        """What stands for a row that is on disk, too."""
        if isinstance(row, Place):
            return place
        if self._fits(0):
            return bytes(row)
        self.in_memory_bytes -= len(row)
        self.on_disk_bytes += place.size
        return place

    def lost_columns(self, samples: Sequence[Sample]) -> None:
        """See `Rows`."""
        if samples:
            self._journal.write(samples, [], [])

    def went(self, samples: Sequence[tuple[Sample, str]], held: Mapping[int, Sample]) -> None:
        """See `Rows`."""
        if not samples:
            return
        self._journal.gone(samples)
        if self._is_mostly_dead():
            oldest = self._journal.oldest
            for columns, old in _by_columns(s for s in held.values() if s.segment == oldest):
                self._write(old, columns, is_moved=True)
            self._journal.trim()

    def _is_mostly_dead(self) -> bool:
        """Whether most of what is on disk is of samples that are gone, as a few old ones keep it there."""
        live_bytes = self.in_memory_bytes + self.on_disk_bytes
        return self._journal.n_files > 1 and self._journal.size_bytes > 2 * live_bytes + _SLACK_BYTES

    def stands(self, standing: Standing) -> None:
        """See `Rows`."""
        before, self._journal.standing = self._journal.standing, standing
        if standing.version > before.version:
            self._journal.note()

    def mend(self, samples: Sequence[Sample]) -> None:
        """See `Rows`."""
        super().mend(samples)
        self._journal.mend(samples)

    def close(self) -> None:
        """See `Rows`."""
        self._journal.close()


def _by_columns(samples: Iterator[Sample]) -> Iterator[tuple[list[int], list[Sample]]]:
    def mask(sample: Sample) -> int:
        return sample.mask

    for _, group in groupby(sorted(samples, key=mask), mask):
        found = list(group)
        yield [i for i, row in enumerate(found[0].rows) if row is not None], found
