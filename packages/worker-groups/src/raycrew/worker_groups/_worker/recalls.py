"""Taking back calls that workers have not begun, where Ray can't: see `runs_in_order` in the wing `_ray`.

A worker has an *inbox*, a memory file that its user's processes on its node can append to. It looks there
before each call, and does not run the ones that it finds. Memory files are Linux's; elsewhere all calls run.
"""

import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

_ID_BYTES = 24


class Inbox:
    """The worker's end."""

    def __init__(self) -> None:
        self._name = f"raycrew-{uuid.uuid4().hex}"
        self._fd = os.memfd_create(self._name) if hasattr(os, "memfd_create") else None
        self._file = None if self._fd is None else os.fstat(self._fd)
        self._read = 0
        self._calls: set[bytes] = set()

    @property
    def address(self) -> str:
        """Where on this node it is, for `recall`."""
        return f"/proc/{os.getpid()}/fd/{self._fd} /memfd:{self._name} (deleted)"

    def has(self, own_call: Callable[[], bytes]) -> bool:
        """Whether a call, which is asked for only if there is anything, was taken back."""
        data = self._unread()
        self._read += len(data)
        self._calls.update(data[i : i + _ID_BYTES] for i in range(0, len(data), _ID_BYTES))
        return bool(self._calls) and own_call() in self._calls

    def _unread(self) -> bytes:
        """What has come; nothing more where a call has closed it, and maybe another file has its number."""
        if self._fd is None or self._file is None:
            return b""
        try:
            found = os.fstat(self._fd)
        except OSError:
            return b""
        is_ours = found.st_size > self._read and os.path.samestat(found, self._file)
        return os.pread(self._fd, found.st_size - self._read, self._read) if is_ours else b""


def recall_all(calls: Iterable[tuple[str, bytes]]) -> list[bool]:
    """`recall` several."""
    return [recall(address, call) for address, call in calls]


def recall(address: str, call: bytes) -> bool:
    """Take back a call of a worker on this node.

    Args:
        address: Of the worker's inbox.
        call: The call's id.

    Returns:
        Whether it has an inbox here.
    """
    path, _, name = address.partition(" ")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # The process may be gone, and another have its number: what was opened must be the inbox.
        if str(Path(f"/proc/self/fd/{fd}").readlink()) != name:
            return False
        os.write(fd, call)
    finally:
        os.close(fd)
    return True
