"""Limits of workers' private memory, which a node's watch keeps, and its keeper once the watch is gone.

Standard library only: a node's watch is sent this module by value, whatever its environment has.
"""

import logging
import os
from contextlib import suppress

from raycrew.worker_groups._on_nodes.process_table import Process, kill, memory_of, runs

logger = logging.getLogger(__name__)

_GROWTH = 5e9  # bytes a second: a thread gets some 2e9 new ones from the kernel, where each is a fault
_SHORTEST_S, _LONGEST_S = 0.01, 0.1


class MemoryLimits:
    """Of the workers of one node.

    Attributes:
        exceeded: Private memory, in bytes, of those that were ended for it.
    """

    def __init__(self) -> None:
        self._limits: dict[Process, int] = {}
        self._unread: set[Process] = set()
        self.exceeded: dict[Process, int] = {}

    def set(self, worker: Process, limit_bytes: int) -> None:
        """Limit a worker from now on."""
        if limit_bytes and worker not in self.exceeded:
            self._limits[worker] = limit_bytes

    def of(self, worker: Process) -> int:
        """A worker's limit, in bytes; 0 for none."""
        return self._limits.get(worker, 0)

    @property
    def are_set(self) -> bool:
        """Whether there is anybody to look after."""
        return bool(self._limits)

    def enforce(self) -> float:
        """End the processes of those that have more than they may, and forget those that are gone.

        Returns:
            Seconds until the next look: the closer one is to its limit, the fewer.
        """
        room = float("inf")
        for worker, limit in list(self._limits.items()):
            try:
                room = min(room, limit - self._enforce(worker, limit))
                self._unread.discard(worker)
            except Exception:  # whatever is wrong with one worker, the others are looked after
                if worker not in self._unread:  # said once, and not ten times a second
                    logger.exception("the memory of process %d can't be limited now", worker.pid)
                self._unread.add(worker)
        return min(_LONGEST_S, max(_SHORTEST_S, room / _GROWTH))

    def _enforce(self, worker: Process, limit: int) -> int:
        """Do so with one; gives what it has."""
        used = memory_of(worker.pid).get("RssAnon", 0)
        if not runs(worker):
            del self._limits[worker]
        elif used > limit:
            logger.warning("process %d has %d bytes of private memory, of %d", worker.pid, used, limit)
            self.exceeded[worker] = used  # first, for whoever hears of its end
            _leave(
                worker.pid, f"ended for its memory: it has {used} bytes of its own, and {limit} is the limit"
            )
            kill(worker)
        return used


def _leave(pid: int, text: str) -> None:
    """Write a line to a process's standard error: who tells of its death may have another watch, or none."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    with suppress(OSError):  # it is closed, or nobody reads it
        descriptor = os.open(f"/proc/{pid}/fd/2", flags)
        try:
            os.write(descriptor, f"\n{text}\n".encode())
        finally:
            os.close(descriptor)
