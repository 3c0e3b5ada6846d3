"""Open files, whose descriptors somebody else may close by mistake: another file has the number then."""

import errno
import os
import secrets
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

MARK_BYTES = 16


class OpenFile:
    """An open file that is closed once nobody has it, unless somebody else has closed it.

    Args:
        number: Its descriptor, which is taken over.
        name: For messages.
        is_it: Whether a descriptor is still that of the file.
    """

    def __init__(self, number: int, name: str, is_it: Callable[[int], bool]) -> None:
        self._number, self._name, self._is_it = number, name, is_it
        self._close = weakref.finalize(self, _close, number, is_it)
        self._close.atexit = False  # some thread may write until the very end

    @classmethod
    def at(cls, path: Path, flags: int, mode: int = 0o600) -> "OpenFile":
        """Open a file by its name.

        Raises:
            OSError: It can't be opened.
        """
        number = os.open(path, flags, mode)
        file = os.fstat(number)
        return cls(number, str(path), lambda number: os.path.samestat(os.fstat(number), file))

    @classmethod
    def without_name(cls, directory: Path | None) -> "OpenFile":
        """Make a file that is gone with the process; its beginning, `MARK_BYTES`, is a mark.

        Such a file is gone as soon as it is closed, and the next one may be the same to the file system.

        Raises:
            OSError: It can't be made.
        """
        mark = secrets.token_bytes(MARK_BYTES)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(mark)
            number = os.dup(file.fileno())
        name = f"a file in {directory or tempfile.gettempdir()}"
        return cls(number, name, lambda number: os.pread(number, MARK_BYTES, 0) == mark)

    @property
    def descriptor(self) -> int:
        """Of this very file.

        Raises:
            OSError: Somebody has closed it.
        """
        if not self.is_open():
            raise OSError(errno.EBADF, "something else has closed it", self._name)
        return self._number

    def is_open(self) -> bool:
        """Whether nobody has closed it."""
        return self._close.alive and _is(self._number, self._is_it)

    def close(self) -> None:
        """Close it, unless somebody has; idempotent."""
        self._close()


def _is(number: int, is_it: Callable[[int], bool]) -> bool:
    try:
        return is_it(number)
    except OSError:
        return False


def _close(number: int, is_it: Callable[[int], bool]) -> None:
    if _is(number, is_it):
        os.close(number)
