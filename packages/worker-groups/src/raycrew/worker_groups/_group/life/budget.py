"""How often a group may be restarted by itself, and how long it waits before it is."""

import time
from collections.abc import Callable

from raycrew.worker_groups.errors import WorkerGroupError

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class RestartBudget:
    """Counts restarts; each begins later after the one before it than that did: 1 s, 2 s, 4 s, … up to 60 s.

    Args:
        most: How many there may be.
        clock: The monotonic clock.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.used = 0
        self._clock = clock
        self._last = float("-inf")

    def take(self) -> float:
        """Take one restart; returns the seconds to wait before it.

        Raises:
            WorkerGroupError: There is none left.
        """
        if self.used >= self.most:
            raise WorkerGroupError(f"all {self.most} restarts of max_restarts are used up")
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.used - 1, 10))
        now = self._clock()
        begin = max(now, self._last + pause_s)
        self.used, self._last = self.used + 1, begin
        return begin - now
