"""How long somebody had something to do."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Occupancy:
    """Seconds in which at least one call was under way.

    Args:
        clock: In seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._under_way, self._since, self._busy_s = clock, 0, 0.0, 0.0

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call is under way for as long as this block; several may be at once."""
        if not self._under_way:
            self._since = self._clock()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._busy_s += self._clock() - self._since

    @property
    def busy_s(self) -> float:
        """Up to now."""
        return self._busy_s + (self._clock() - self._since if self._under_way else 0.0)
