"""How often a directory is told of buckets while more of them come."""

import math
import time
from collections.abc import Callable

_LEAST_S, _MOST_S = 0.003, 1.0
_TIMES = 1


class Pace:
    """When to say something again: as long as its answer took is for other work, up to a second.

    An answer takes time of all processes that it goes through, and more where processors are busy.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._silent_until = clock, -math.inf

    def is_silent(self) -> bool:
        """Whether what there is to say is better said with what comes next."""
        return self._clock() < self._silent_until

    def said(self, took_s: float = 0.0) -> None:
        """It was said, and the answer took so long; math.inf where nobody wants to know."""
        self.rest(_TIMES * took_s)

    def rest(self, quiet_s: float) -> None:
        """Nobody waits to hear more for so long."""
        self._silent_until = self._clock() + min(_MOST_S, max(_LEAST_S, quiet_s))
