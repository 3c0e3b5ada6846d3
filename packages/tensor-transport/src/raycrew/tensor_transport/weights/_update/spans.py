"""When which process did what during an update: what a chart of it is drawn from."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of time.

    Attributes:
        phase: "gather", "put", "wire", "ahead", "load" or "pause".
        start_s: When it began, in seconds since the epoch by the clock of the machine it was on.
        end_s: When it ended.
    """

    phase: str
    start_s: float
    end_s: float


class Stopwatch:
    """Collects spans."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Time what happens inside."""
        start = time.time()
        try:
            yield
        finally:
            self._spans.append(Span(phase, start, time.time()))

    def total(self, phase: str) -> float:
        """Seconds in a phase."""
        return sum(span.end_s - span.start_s for span in self._spans if span.phase == phase)

    @property
    def spans(self) -> tuple[Span, ...]:
        """In the order in which they ended."""
        return tuple(self._spans)
