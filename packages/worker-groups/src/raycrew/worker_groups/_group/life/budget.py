"""How often a group may be restarted by itself, and how long it waits before it is."""

import time
from collections.abc import Callable

from raycrew.worker_groups.errors import WorkerGroupError

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
#: After so long without a death restarts are counted anew.
QUIET_S = 3600.0


class RestartBudget:
    """Counts restarts; each begins later after the one before it than that did: 1 s, 2 s, 4 s, … up to 60 s.

    An hour after the last one ended, or was refused, the count begins anew.

    Args:
        most: How many there may be without such an hour between them.
        clock: The monotonic clock.

    Attributes:
        is_refusing: Whether the last one that was asked for was refused.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.used = 0
        self.is_refusing = False
        self._clock = clock
        self._last = self._busy_until = float("-inf")

    def take(self) -> float:
        """Take one restart; returns the seconds to wait before it.

        Raises:
            WorkerGroupError: There is none left.
        """
        now = self._clock()
        if now - self._busy_until >= QUIET_S:
            self.used = 0
        self._busy_until = now
        self.is_refusing = self.used >= self.most
        if self.is_refusing:
            most = "the one restart" if self.most == 1 else f"all {self.most} restarts"
            raise WorkerGroupError(f"{most} of max_restarts {'is' if self.most == 1 else 'are'} used up")
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.used - 1, 10))
        begin = max(now, self._last + pause_s)
        self.used, self._last = self.used + 1, begin
        return begin - now

    def ended(self) -> None:
        """Take in that a restart is over, well or not: it may have taken longer than it is quiet for."""
        self._busy_until = self._clock()
