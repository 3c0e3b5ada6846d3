"""The rows of samples: in memory as far as they fit, the newest on disk."""

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SEGMENT_BYTES = 64 * 1024 * 1024


class Held(NamedTuple):
    """A row that is no bytes: of a handle on many rows, or something as it is.

    Attributes:
        value: The handle.
        row: Which of its rows; None where it is the row.
    """

    value: Any
    row: int | None


class Place(NamedTuple):
    """Where the bytes of a row are."""

    segment: int
    offset: int
    size: int


Row = bytes | Held


class SpilledRows:
    """Rows in files without names, which are gone with the process however it ends.

    Args:
        directory: Where; None for the one of temporary files.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._files: dict[int, tuple[Any, int]] = {}  # and how many rows in it are still wanted
        self._current, self._end = -1, SEGMENT_BYTES

    @classmethod
    def of(cls, spill: bool | str | os.PathLike[str]) -> "SpilledRows | None":
        """As an option says: not at all, somewhere, or in a folder.

        Raises:
            OSError: Nothing can be written there.
        """
        if spill is False:
            return None
        made = cls(None if spill is True else Path(spill))
        made.free(made.write(b""))
        return made

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
        _write_all(file.fileno(), row, self._end)
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


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        offset += written
        rest = rest[written:]


def read_all(descriptor: int, place: Place) -> bytes:
    """The bytes at a place in a file.

    Raises:
        OSError: They are not all there.
    """
    data = os.pread(descriptor, place.size, place.offset)
    while len(data) < place.size:
        more = os.pread(descriptor, place.size - len(data), place.offset + len(data))
        if not more:
            raise OSError(
                f"a row of {place.size} bytes at {place.offset} is cut short; was its file truncated?"
            )
        data += more
    return data


class Rows:
    """Keeps rows, and says how many bytes they take.

    Args:
        max_bytes: Most bytes in memory; None for no bound.
        spilled: Where others go; None where they have to wait.

    Attributes:
        in_memory_bytes: Of rows in memory.
        on_disk_bytes: Of rows that are only on disk.
    """

    def __init__(self, max_bytes: int | None, spilled: SpilledRows | None) -> None:
        self.in_memory_bytes = self.on_disk_bytes = 0
        self._max_bytes, self._spilled = max_bytes, spilled

    def has_room(self, size_bytes: int) -> bool:
        """Whether so much more may come."""
        return self._spilled is not None or self._fits(size_bytes) or not self.in_memory_bytes

    def _fits(self, size_bytes: int) -> bool:
        return self._max_bytes is None or self.in_memory_bytes + size_bytes <= self._max_bytes

    def keep(self, row: Row) -> Row | Place:
        """What stands for a row from now on.

        Raises:
            OSError: There is no room on disk.
        """
        if isinstance(row, Held):
            return row
        if self._spilled is not None and not self._fits(len(row)):
            place = self._spilled.write(row)
            self.on_disk_bytes += place.size
            return place
        self.in_memory_bytes += len(row)
        return row

    def read(self, kept: Row | Place) -> Row:
        """The row that something stands for."""
        if isinstance(kept, Place) and self._spilled is not None:
            return self._spilled.read(kept)
        return kept  # type: ignore[return-value]

    def free(self, kept: Iterable[Row | Place | None]) -> None:
        """Want rows no longer."""
        for row in kept:
            if isinstance(row, bytes):
                self.in_memory_bytes -= len(row)
            elif isinstance(row, Place):
                self.on_disk_bytes -= row.size
                if self._spilled is not None:
                    self._spilled.free(row)

    def close(self) -> None:
        """Give up what is on disk."""
        if self._spilled is not None:
            self._spilled.close()


def size_of(rows: Iterable[Sequence[Row]]) -> int:
    """Bytes of rows in columns."""
    return sum(len(row) for column in rows for row in column if isinstance(row, bytes))
