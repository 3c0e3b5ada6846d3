"""Locked files: each is its process's own, and nobody's that is forked from it."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from threading import RLock

from raycrew.venv_manager._waiting.forks import PerProcess

_open: set[int] = set()
#: Held while a file is open and not noted, or the other way round: nothing is forked from this process then.
no_fork = PerProcess(RLock)


def _leave_to_parent() -> None:
    """What is locked is shared with the parent: a copy would keep it locked, and one unlocking unlocks both.

    The numbers stay, as code that is in the middle of something may let go of them later.
    """
    if not _open:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in _open:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _open.clear()


os.register_at_fork(
    before=lambda: no_fork.here.acquire(),
    after_in_parent=lambda: no_fork.here.release(),
    after_in_child=_leave_to_parent,
)


def take(path: str | Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """A file that can be locked, to be let go of by `leave`.

    Raises:
        OSError: It cannot be opened.
    """
    with no_fork.here:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        _open.add(descriptor)
    return descriptor


def leave(descriptor: int) -> None:
    """Unlock and close a file; unlocking is said, as a process that was started may share it."""
    with no_fork.here:
        _open.discard(descriptor)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextlib.contextmanager
def taken(path: str | Path) -> Iterator[int]:
    """A file that can be locked, until the end of the block.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = take(path)
    try:
        yield descriptor
    finally:
        leave(descriptor)


def try_lock(descriptor: int, operation: int) -> bool:
    """Whether a file is locked now: not if another one has it.

    Raises:
        OSError: Its file system has no locks.
    """
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
