"""The processes below this one: found wherever they have put themselves, and ended."""

import contextlib
import ctypes
import functools
import logging
import os
import pathlib
import select
import time
from collections.abc import Set

import psutil

logger = logging.getLogger(__name__)

END_S = 5.0
"""How long the kernel may take to end what was killed."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, in whatever session it is."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_at_parents_end(signum: int) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def has_children() -> bool:
    """Whether this process has any child, ended ones that nobody waited for too; one system call."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children() -> set[int]:
    """The children of this process, adopted ones too."""
    if not _kernel_lists_children():
        return {process.pid for process in psutil.Process().children()}
    found: set[int] = set()
    for thread in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found.update(map(int, (thread / "children").read_text().split()))
    return found


def end_children(spare: Set[int] = frozenset()) -> set[int]:
    """Kill every child but `spare`, with all below it, and wait until none is left.

    This process must adopt orphans, so that no descendant gets away by losing its parent.

    Returns:
        Those that would not end, because they are another user's or hang in the kernel.
    """
    deadline = time.monotonic() + END_S
    while has_children() and (doomed := children() - spare):
        for pid in doomed:
            _kill_tree(pid)
        left = {pid for pid in doomed if not _reap(pid, deadline)}
        if left:
            logger.warning("processes %s, started by items of fan_out, can't be ended", sorted(left))
            return left
    return set()


def _kill_tree(pid: int) -> None:
    with contextlib.suppress(psutil.Error):  # gone, or another user's by now
        root = psutil.Process(pid)
        root.suspend()  # so that it can't start more meanwhile
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _reap(pid: int, deadline: float) -> bool:
    """Wait for a child's end; whether it came in time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:  # another thread has waited for it
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(1000 * max(deadline - time.monotonic(), 0)):
            return False
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        return True
    finally:
        os.close(fd)


@functools.cache
def _kernel_lists_children() -> bool:
    return pathlib.Path("/proc/thread-self/children").exists()


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
