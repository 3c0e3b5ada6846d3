"""The folder of a durable queue: this user's alone, and one process's at a time."""

import fcntl
import os
import stat
import weakref
from collections import OrderedDict
from pathlib import Path

from raycrew.worker_groups.errors import SampleJournalError
from raycrew.worker_groups.rollouts._files import OpenFile
from raycrew.worker_groups.rollouts.samples._storage.files import read_all
from raycrew.worker_groups.rollouts.samples._storage.rows import Place

_MOST_OPEN = 32
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW

_locked: weakref.WeakSet["Folder"] = weakref.WeakSet()


def _forget_locks() -> None:
    for folder in list(_locked):
        folder.forget()


os.register_at_fork(after_in_child=_forget_locks)


class Folder:
    """Numbered files in a folder that is locked as long as this is open.

    Args:
        path: The folder; made where there is none, for its user alone.

    Raises:
        SampleJournalError: Another process uses it, or others than this user can write there.
        OSError: It can't be made or opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path)
        self._lock = lock = OpenFile.at(path / "lock", _FLAGS | os.O_RDWR | os.O_CREAT)
        self._open: OrderedDict[int, OpenFile] = OrderedDict()
        _locked.add(self)
        try:
            fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock.descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
            self._lock.close()
            raise SampleJournalError(f"{path} is in use by another queue (process {holder})") from None
        except OSError:
            self._lock.close()
            raise
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, str(os.getpid()).encode(), 0)

    def numbers(self) -> list[int]:
        """The numbers of all files, in order."""
        return sorted(int(path.stem) for path in self.path.glob("*.samples") if path.stem.isdigit())

    def name(self, number: int) -> Path:
        """The path of a file."""
        return self.path / f"{number:010d}.samples"

    def create(self, number: int, *, is_synced: bool) -> OpenFile:
        """A new file, to be written to; it is the caller's."""
        made = OpenFile.at(self.name(number), _FLAGS | os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        if is_synced:
            self._sync_names()
        return made

    def content(self, number: int) -> bytes:
        """All of a file."""
        with os.fdopen(os.open(self.name(number), _FLAGS | os.O_RDONLY), "rb") as file:
            return file.read()

    def read(self, place: Place) -> bytes:
        """A row.

        Raises:
            OSError: It is not there.
        """
        return read_all(self._descriptor(place.segment), place)

    def cut(self, number: int, size: int) -> None:
        """Leave the beginning of a file, or remove it where nothing is left."""
        if size:
            os.truncate(self.name(number), size)
        else:
            self.remove(number)

    def remove(self, number: int, *, is_synced: bool = False) -> None:
        """Remove a file."""
        if (opened := self._open.pop(number, None)) is not None:
            opened.close()
        self.name(number).unlink(missing_ok=True)
        if is_synced:
            self._sync_names()

    def close(self) -> None:
        """Give the folder up; idempotent."""
        while self._open:
            self._open.popitem()[1].close()
        self._lock.close()

    def _descriptor(self, number: int) -> int:
        opened = self._open.get(number)
        if opened is None or not opened.is_open():
            self._open[number] = opened = OpenFile.at(self.name(number), _FLAGS | os.O_RDONLY)
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(number)
        return opened.descriptor

    def _sync_names(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def forget(self) -> None:
        """Have a forked child not keep the folder locked when its parent has ended."""
        self._lock.close()


def _check_owner(path: Path) -> None:
    """What is in there is unpickled."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise SampleJournalError(f"{path} is no folder (a link is not followed)")
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise SampleJournalError(
            f"{path} belongs to another user, or others can write there: rows are unpickled"
        )
