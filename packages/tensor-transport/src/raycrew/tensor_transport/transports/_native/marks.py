"""Words of a process that others of its user read at once, even while it stands still; gone when it ends."""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

WORD_BYTES = 8


class Marks:
    """Words in a file without a name in any folder, which others find among the process's descriptors.

    Whoever closes that descriptor, as some programs do with all that they don't know, takes the words from
    those who come later; those who read them go on seeing what is written.

    Args:
        count: How many there are.

    Raises:
        OSError: There is no descriptor to be had.
        RuntimeError: There is no memory.
    """

    def __init__(self, count: int) -> None:
        self.name = f"raycrew-marks-{secrets.token_hex(8)}"
        self.fd = os.memfd_create(self.name, os.MFD_CLOEXEC)
        self._file = os.fstat(self.fd)
        try:  # torch's mapping needs no descriptor: Python's has one, and closes whatever has its number.
            path = f"/proc/self/fd/{self.fd}"
            self._words = torch.from_file(path, shared=True, size=count, dtype=torch.int64, device="cpu")
        except BaseException:
            self.let_go()
            raise

    def write(self, slot: int, mark: int) -> None:
        """Set a word; whoever reads it from now on sees that."""
        self._words[slot] = mark

    def take_away(self) -> None:
        """All words are 0 for whoever reads them, and the file goes."""
        self._words.zero_()
        self.let_go()

    def let_go(self) -> None:
        """In a forked child: the words stay as they are, for the parent."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self.fd), self._file):
                os.close(self.fd)


@contextlib.contextmanager
def reading(pid: int, fd: int, name: str, slot: int) -> Iterator[Callable[[], int]]:
    """What tells a word of another process as it is now.

    Raises:
        FileNotFoundError: There is no such process, or it has taken its words away.
        OSError: This process may not look into that one, or has no descriptor for it.
    """
    path = Path(f"/proc/{pid}/fd/{fd}")
    if f"memfd:{name}" not in str(path.readlink()):  # To open another file could do anything.
        raise FileNotFoundError(f"{path} is another file by now")
    own = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield lambda: int.from_bytes(os.pread(own, WORD_BYTES, WORD_BYTES * slot), "little")
    finally:
        os.close(own)
