"""Rows in memory as far as they fit, and the newest on disk, in files that go with the process."""

import os
import tempfile
from pathlib import Path
from typing import Any

from raycrew.worker_groups.rollouts.samples._storage.files import SEGMENT_BYTES, read_all, write_all
from raycrew.worker_groups.rollouts.samples._storage.rows import Place, Row, Rows


class SpilledRows:
    """Rows in files without names, which are gone with the process however it ends.

    Args:
        directory: Where; None for the one of temporary files.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._files: dict[int, tuple[Any, int]] = {}  # and how many rows in it are still wanted
        self._current, self._end = -1, SEGMENT_BYTES

    def write(self, row: bytes) -> Place:
        """Put a row away.

        Raises:
            OSError: There is no room.
        """
        if self._end >= SEGMENT_BYTES:
            file: Any = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
            self._forget(self._current)
            self._current, self._end = self._current + 1, 0
            self._files[self._current] = (file, 0)
        file, n_rows = self._files[self._current]
        write_all(file.fileno(), row, self._end)
        place = Place(self._current, self._end, len(row))
        self._files[self._current] = (file, n_rows + 1)
        self._end += len(row)
        return place

    def read(self, place: Place) -> bytes:
        """The row at a place."""
        return read_all(self._files[place.segment][0].fileno(), place)

    def free(self, place: Place) -> None:
        """Want a row no longer; a file goes with its last one."""
        file, n_rows = self._files[place.segment]
        self._files[place.segment] = (file, n_rows - 1)
        if place.segment != self._current:
            self._forget(place.segment)

    def _forget(self, segment: int) -> None:
        file, n_rows = self._files.get(segment, (None, 0))
        if file is not None and not n_rows:
            file.close()
            del self._files[segment]

    def close(self) -> None:
        """Give all files up."""
        for file, _ in self._files.values():
            file.close()
        self._files.clear()


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
        self._spilled.free(self._spilled.write(b""))

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

    def close(self) -> None:
        """See `Rows`."""
        self._spilled.close()
