"""Files of shared memory that belong to one user: their folder, their names, locks that end with processes.

The folder is `raycrew-UID`, for its user alone. In it, a session has the files `raycrew-SESSION.session`, and
for each process `raycrew-SESSION-EPOCH.owner` and `raycrew-SESSION-EPOCH-ARENA`.

- An owner holds an exclusive lock on a file of its epoch; who gets it knows that the owner is dead.
- Every process of a session holds a shared lock on the session's file. Who gets the exclusive one knows that
  the session is over, and removes its files.
- Readers keep mappings of arenas without a lock, and look at them under one: a file that is removed is
  emptied, as its memory would live on with them.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from raycrew.tensor_transport._bytes.shared.file_memory import hold_open
from raycrew.tensor_transport.errors import TransportError, TransportTimeoutError

PREFIX = "raycrew-"
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What there may be no more of: descriptors of a process, or of the machine, and mappings."""
HEADER_BYTES = 512 * 1024
"""What arenas begin with, and no other file is longer than."""
_SESSION = re.compile(rf"{PREFIX}([0-9A-Za-z]+)\.session")
_MEMBER = re.compile(rf"{PREFIX}([0-9A-Za-z]+)-([0-9a-f]+)(\.owner|-[0-9a-f]+)")


@contextlib.contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Raise what the system refuses as `TransportError`."""
    try:
        yield
    except TransportError:
        raise
    except OSError as error:
        raise TransportError(f"{what}: {error}") from error


def own_folder(directory: Path) -> Path:
    """This user's folder in a directory that everybody may have; made if it is not there.

    Raises:
        TransportError: Somebody else could put files there.
    """
    uid, folder = os.geteuid(), directory / f"{PREFIX}{os.geteuid()}"
    above = directory.stat()
    if above.st_uid not in (0, uid) or (above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX):
        raise TransportError(
            f"others may move files in {directory} (owner {above.st_uid}, mode "
            f"{stat.filemode(above.st_mode)}): name a directory of root or of this user, "
            "sticky if others may write to it"
        )
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    found = folder.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
        raise TransportError(
            f"{folder} is not a folder of user {uid} alone (owner {found.st_uid}, mode "
            f"{stat.filemode(found.st_mode)}): somebody else may have made it; remove it, or name another "
            "directory"
        )
    return folder


def open_own(path: Path, flags: int) -> int:
    """Open a file of this user; a link is not followed, but those in /proc, which stand for open files.

    Raises:
        OSError: It cannot be opened.
        TransportError: It is not a plain file, or another user's.
    """
    follow = 0 if is_descriptor(path) else os.O_NOFOLLOW
    fd = os.open(path, flags | follow | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise TransportError(f"{path} is of user {found.st_uid}, or no plain file: it is not used")
    return fd


def is_descriptor(path: Path) -> bool:
    """Whether this is a link of /proc, which stands for what a process has open under a number now."""
    return str(path).startswith("/proc/")


class OwnFile:
    """A file that this process has open under a number, for which somebody may close it by mistake."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._file = os.fstat(fd)

    def size_bytes(self) -> int:
        """How long it is now; 0 where it was closed, and maybe the number given to another file."""
        with contextlib.suppress(OSError):
            found = os.fstat(self.fd)
            if os.path.samestat(found, self._file):
                return found.st_size
        return 0

    def close(self) -> None:
        """Close it, unless somebody has."""
        if _is_open(self.fd, self._file):
            os.close(self.fd)


class LockFile:
    """A file that is locked for as long as this object is open, whoever closes its descriptor."""

    def __init__(self, path: Path, *, shared: bool) -> None:
        self.path = path
        self._open: OwnFile | None = OwnFile(_open_locked(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX))
        try:
            self._let_go = hold_open(self._open.fd)
        except OSError:
            self._open.close()
            raise

    def close(self) -> None:
        """Give the lock up, unless another process was forked while it was held; idempotent."""
        if self._open is not None:
            self._let_go()
            self._open.close()
            self._open = None


def remove(path: Path) -> None:
    """Remove a file, and its memory at once if nobody has a lock on it; else it goes with the last lock."""
    try:
        fd = open_own(path, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        path.unlink(missing_ok=True)  # First: whoever gives up a lock from now on sees it.
        _empty(fd)
    finally:
        os.close(fd)


def close_locked(fd: int, file: os.stat_result) -> bool:
    """Close a file that this process has locked, with its memory if it was removed; whether it was.

    The lock is left to processes that were forked meanwhile: it is not taken back, only closed. Another file
    that has its number, since somebody closed what is not his, is left alone. Where there is no descriptor to
    be had, memory that was removed goes with the last mapping.
    """
    if not _is_open(fd, file):
        return False
    try:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        is_removed = not os.fstat(fd).st_nlink
        os.close(fd)
        return is_removed
    os.close(fd)
    try:
        is_removed = not os.fstat(again).st_nlink
        if is_removed:
            _empty(again)
        return is_removed
    finally:
        os.close(again)


def _is_open(fd: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), file)
    except OSError:
        return False


def _empty(fd: int) -> None:
    """Give an arena's memory back, but for its header, which is looked at without a lock."""
    if os.fstat(fd).st_size > HEADER_BYTES and try_lock(fd, fcntl.LOCK_EX):
        os.ftruncate(fd, HEADER_BYTES)


def is_free(path: Path) -> bool:
    """Whether nobody has a lock on a file: whoever locked it is gone, or the file is."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, ProcessLookupError):
        return True
    try:
        return try_lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def try_lock(fd: int, kind: int) -> bool:
    """Lock a file, if that needs no waiting; whether it was done."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def files_of(folder: Path, session: str) -> list[Path]:
    """All files of a session but its own."""
    return [path for path in sorted(folder.iterdir()) if _session_in(_MEMBER, path.name) == session]


def arenas_of(folder: Path, session: str) -> list[Path]:
    """The arenas of a session."""
    return [path for path in files_of(folder, session) if path.suffix != ".owner"]


def is_arena(name: object) -> bool:
    """Whether this is the name of an arena, as handles give it."""
    name = f"{PREFIX}{name}"
    return _session_in(_MEMBER, name) is not None and not name.endswith(".owner")


def sweep(folder: Path) -> list[str]:
    """Remove the files of sessions that are over; their names."""
    ended = []
    for path in sorted(folder.iterdir()):
        session = _session_in(_SESSION, path.name)
        if session is None:
            continue
        with contextlib.suppress(OSError, TransportError):
            fd = open_own(path, os.O_RDWR)
            try:
                if try_lock(fd, fcntl.LOCK_EX):
                    for file in files_of(folder, session):
                        remove(file)
                    path.unlink(missing_ok=True)
                    ended.append(session)
            finally:
                os.close(fd)
    return ended


def _session_in(pattern: re.Pattern[str], name: str) -> str | None:
    found = pattern.fullmatch(name)
    return None if found is None else found[1]


def _open_locked(path: Path, kind: int) -> int:
    """Open and lock a file that is still the one of that name afterwards (a sweep may have removed it)."""
    while True:
        fd = open_own(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, kind)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat(follow_symlinks=False)):
                return fd
        os.close(fd)


def machine_name(directory: Path) -> str:
    """What two processes have in common that see the same shared memory: the boot, and the file system."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip()[:13] if boot.exists() else os.uname().nodename
    return f"{host}-{directory.stat().st_dev}"


def in_time(path: Path, timeout_s: float | None) -> Callable[[], None]:
    """What to heed where nothing but time ends a wait for an arena: it raises `TransportTimeoutError`."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def heed() -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise TransportTimeoutError(f"{path} was not let go of within {timeout_s} s")

    return heed


def share(fd: int, heed: Callable[[], object]) -> None:
    """Wait for a shared lock on an open file. What `heed` raises, which is called meanwhile, ends that."""
    while not try_lock(fd, fcntl.LOCK_SH):
        heed()
        time.sleep(0.001)
