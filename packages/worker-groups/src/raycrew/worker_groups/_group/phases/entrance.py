"""One at a time, first come, first served; whoever is in may come in again."""

import os
import threading
from collections import deque

from raycrew.cluster_core import Session
from raycrew.worker_groups._calls import left
from raycrew.worker_groups.errors import PhaseError, PhaseTimeoutError

_SLICE_S = 0.1  # between two looks at whether what waits here is still wanted


class Entrance:
    """Whoever comes in is a thread or a task, and is in as often as it has come in; of this process alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._inside: object | None = None
        self._turns: list[str] = []
        self._pid = os.getpid()

    @property
    def _is_forked(self) -> bool:
        """Whether threads of the process are missing in this one: those who are in, and who hold the lock."""
        return os.getpid() != self._pid

    def enter(self, who: object, name: str, deadline: float | None, *, may_wait: bool = True) -> bool:
        """Come in for a turn; whether this is the outermost one.

        Raises:
            PhaseError: Who asks is in for another turn, or would have to wait and may not, or was forked.
            PhaseTimeoutError: Others did not leave before the deadline.
            asyncio.CancelledError: What this thread does was given up.
        """
        if self._is_forked:
            raise PhaseError(f"turns of {name!r} are for the process that this one was forked from", name)
        with self._changed:
            if self._inside is who:
                if self._turns[-1] != name:
                    raise PhaseError(f"within a turn of {self._turns[-1]!r} there is none of {name!r}", name)
                self._turns.append(name)
                return False
            if not may_wait and (self._inside is not None or self._waiting):
                raise PhaseError(f"waiting for {name!r} here would block the event loop: async with", name)
            self._await(name, deadline)
            self._inside, self._turns = who, [name]
            return True

    def _await(self, name: str, deadline: float | None) -> None:
        ticket = object()
        self._waiting.append(ticket)
        try:
            while self._inside is not None or self._waiting[0] is not ticket:
                Session.check_wanted()
                wait_s = left(deadline, _SLICE_S)
                if not wait_s:
                    other = repr(self._turns[-1]) if self._turns else "whoever came first"
                    said = f"the devices were not free for {name!r} in time: {other} has its turn"
                    raise PhaseTimeoutError(said, name)
                self._changed.wait(wait_s)
        finally:
            self._waiting.remove(ticket)
            self._changed.notify_all()

    def leave(self, who: object) -> None:
        """Be in once less; whoever is not in does nothing."""
        if self._is_forked:
            return
        with self._changed:
            if self._inside is who:
                self._turns.pop()
                if not self._turns:
                    self._inside = None
                    self._changed.notify_all()

    def is_about_to_leave(self, who: object) -> str | None:
        """The turn that is over once somebody leaves; None if it then still is within one, or is not in."""
        if self._is_forked:
            return None
        with self._changed:
            return self._turns[0] if self._inside is who and len(self._turns) == 1 else None

    def turn_of(self, who: object) -> str | None:
        """What somebody is in for; None if it isn't."""
        if self._is_forked:
            return None
        with self._changed:
            return self._turns[-1] if self._inside is who else None
