"""Rows in memory as far as they fit, and the newest on disk, in files that go with the process."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from raycrew.worker_groups.rollouts._files import MARK_BYTES, OpenFile
from raycrew.worker_groups.rollouts.samples._states import Sample
from raycrew.worker_groups.rollouts.samples._storage.files import SEGMENT_BYTES, read_all, write_all
from raycrew.worker_groups.rollouts.samples._storage.holes import punch
from raycrew.worker_groups.rollouts.samples._storage.rows import Place, Row, Rows

#: Of one file, of which each takes a descriptor of the process.
LONG_BYTES = 1 << 30
#: What is given back at once.
BLOCK_BYTES = 1 << 20


class SpilledRows:
    """Rows in files without names, which are gone with the process however it ends.

    A file goes with its last row; before that, blocks of it do in which nothing is wanted any more. Where the
    file system can't take single blocks back, files are short.

    Args:
        directory: Where; None for the one of temporary files.

    Raises:
        OSError: Nothing can be written there.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._files: dict[int, OpenFile] = {}
        self._wanted: dict[int, Counter[int]] = {}  # by file and block, how many rows lie there
        self._current = self._end = 0
        self._begin_file()
        write_all(self._files[0].descriptor, bytes(1), MARK_BYTES)
        self._has_holes = punch(self._files[0].descriptor, MARK_BYTES, BLOCK_BYTES)
        self._most_bytes = LONG_BYTES if self._has_holes else SEGMENT_BYTES

    def _begin_file(self) -> None:
        file = OpenFile.without_name(self._directory)
        self._files[self._current], self._wanted[self._current], self._end = file, Counter(), MARK_BYTES

    def write(self, row: bytes) -> Place:
        """Put a row away.

        Raises:
            OSError: There is no room.
        """
        if self._end >= self._most_bytes or not self._files[self._current].is_open():
            before, self._current = self._current, self._current + 1
            try:
                self._begin_file()
            except OSError:
                self._current = before
                raise
            self._forget(before)
        write_all(self._files[self._current].descriptor, row, self._end)
        place = Place(self._current, self._end, len(row))
        self._wanted[self._current].update(_blocks(place))
        self._end += len(row)
        return place

    def read(self, place: Place) -> bytes:
        """The row at a place."""
        return read_all(self._files[place.segment].descriptor, place)

    def free(self, place: Place) -> None:
        """Want a row no longer; what it was the last one in goes."""
        wanted = self._wanted[place.segment]
        wanted.subtract(_blocks(place))
        for block in [block for block in _blocks(place) if not wanted[block]]:
            del wanted[block]
            self._give_back(place.segment, block)
        if place.segment != self._current:
            self._forget(place.segment)

    def count(self, places: Iterable[Place]) -> None:
        """Find out anew what is wanted; files in which nothing is go."""
        for wanted in self._wanted.values():
            wanted.clear()
        for place in places:
            self._wanted[place.segment].update(_blocks(place))
        for segment in [segment for segment in self._files if segment != self._current]:
            self._forget(segment)

    def _give_back(self, segment: int, block: int) -> None:
        is_written = segment != self._current or (block + 1) * BLOCK_BYTES <= self._end
        if self._has_holes and is_written and self._files[segment].is_open():
            start = max(block * BLOCK_BYTES, MARK_BYTES)
            punch(self._files[segment].descriptor, start, (block + 1) * BLOCK_BYTES - start)

    def _forget(self, segment: int) -> None:
        if segment in self._files and not self._wanted[segment]:
            self._files.pop(segment).close()
            del self._wanted[segment]

    def close(self) -> None:
        """Give all files up."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def _blocks(place: Place) -> range:
    """The blocks in which a row lies, one of no bytes, too."""
    return range(place.offset // BLOCK_BYTES, (place.offset + max(place.size, 1) - 1) // BLOCK_BYTES + 1)


class SpillingRows(Rows):
    """Keeps rows in memory, and those that come when that is full on disk.

    Args:
        max_bytes: Most bytes in memory.
        directory: Where files are; None for the folder of temporary files.

    Raises:
        OSError: Nothing can be written there.
    """

    overflows = True

    def __init__(self, max_bytes: int | None, directory: str | os.PathLike[str] | None) -> None:
        super().__init__(max_bytes)
        self._spilled = SpilledRows(None if directory is None else Path(directory))

    def keep(self, row: Row) -> Row | Place:
        """See `Rows`."""
        if not isinstance(row, bytes) or self._fits(len(row)):
            return super().keep(row)
        place = self._spilled.write(row)
        self.on_disk_bytes += place.size
        return place

    def _at(self, place: Place) -> bytes:
        return self._spilled.read(place)

    def _free_place(self, place: Place) -> None:
        self._spilled.free(place)

    def mend(self, samples: Sequence[Sample]) -> None:
        """See `Rows`."""
        super().mend(samples)
        self._spilled.count(row for sample in samples for row in sample.rows if isinstance(row, Place))

    def close(self) -> None:
        """See `Rows`."""
        self._spilled.close()
