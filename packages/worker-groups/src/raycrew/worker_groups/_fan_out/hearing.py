"""Whether hosts that run batches answer: one that is stopped neither reports nor dies."""

import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

H = TypeVar("H")
Q = TypeVar("Q")

LOOK_S = 5.0
SILENT_S = 60.0
"""So many seconds of looks in vain, and a host is taken not to answer."""


class Hearing(Generic[H, Q]):
    """Of one call. What is counted are looks: for how long this process itself was stopped is of no matter.

    Args:
        ask: Asks a host what it can answer at once whatever it runs.
        is_answered: Whether it has answered that.
        clock: Seconds.
    """

    def __init__(
        self,
        ask: Callable[[H], Q],
        is_answered: Callable[[Q], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._is_answered, self._clock = ask, is_answered, clock
        self._asked: dict[H, Q] = {}
        self._missed: Counter[H] = Counter()
        self._due = clock() + LOOK_S

    @property
    def pause_s(self) -> float:
        """Seconds to the next look."""
        return max(0.0, self._due - self._clock())

    def fallen_silent(self, busy: Collection[H]) -> list[H]:
        """Those of the hosts with batches that are found not to answer by this look, if one is due."""
        if self.pause_s:
            return []
        self._due = self._clock() + LOOK_S
        self._asked = {host: question for host, question in self._asked.items() if host in busy}
        for host in busy:
            if host in self._asked and not self._is_answered(self._asked[host]):
                self._missed[host] += 1
            else:
                self._asked[host], self._missed[host] = self._ask(host), 0
        return [host for host in busy if self._missed[host] == round(SILENT_S / LOOK_S)]
