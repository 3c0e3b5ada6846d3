"""The terminal that a command may read, although it runs in a process group of its own."""

import os
import signal
from types import TracebackType
from typing import Self


class Terminal:
    """The controlling terminal of this process, if it has one: it is lent to a group that asks for it."""

    def __init__(self) -> None:
        try:
            self._descriptor = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:  # There is none, as in most containers and jobs.
            self._descriptor = -1
        self._lent_to = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor < 0:
            return
        if self.is_lent:
            self._give(os.getpgrp())
        os.close(self._descriptor)
        self._descriptor = -1

    @property
    def is_lent(self) -> bool:
        """Whether another group reads it at the moment, on loan."""
        return self._lent_to > 0 and self._reader() == self._lent_to

    def lend(self, group: int) -> bool:
        """Let a group read it; False where this process's own group may not, being in the background."""
        if self._descriptor < 0 or self._reader() not in (os.getpgrp(), group):
            return False
        self._give(group)
        self._lent_to = group
        return True

    def _reader(self) -> int:
        try:
            return os.tcgetpgrp(self._descriptor)
        except OSError:  # It has been hung up.
            return -1

    def _give(self, group: int) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})  # Else this would be stopped.
        try:
            os.tcsetpgrp(self._descriptor, group)
        except OSError:  # Hung up, or the group has ended: nobody reads then.
            self._lent_to = 0
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
