"""Reading and writing whole rows at an offset of a file."""

import errno
import os
from pathlib import Path

from raycrew.worker_groups.rollouts.samples._storage.rows import Place

SEGMENT_BYTES = 64 * 1024 * 1024


class OpenFile:
    """An open file, whose descriptor somebody else may close by mistake: another file has its number then."""

    def __init__(self, path: Path, flags: int) -> None:
        self._path = path
        self._number = os.open(path, flags, 0o600)
        self._file = os.fstat(self._number)

    @property
    def descriptor(self) -> int:
        """Of this very file.

        Raises:
            OSError: Somebody has closed it.
        """
        if not self.is_open():
            raise OSError(errno.EBADF, "something else has closed it", str(self._path))
        return self._number

    def is_open(self) -> bool:
        """Whether nobody has closed it."""
        try:
            return os.path.samestat(os.fstat(self._number), self._file)
        except OSError:
            return False

    def close(self) -> None:
        """Close it, unless somebody has."""
        if self.is_open():
            os.close(self._number)


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Write at an offset of a file."""
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
