"""What is told of a queue to whoever observes this process, or counts for Ray's endpoint."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from raycrew.worker_groups._health import Span, observed
from raycrew.worker_groups.rollouts.samples._keeping import TALLIED

logger = logging.getLogger(__name__)

#: Those that are no numbers of samples have counters of their own.
_COUNTERS = {"versions_behind": "sample_versions_behind", "waited_s": "sample_waited_seconds"}

Count = Callable[[str, Mapping[str, str], float], None]


class Teller:
    """Tells how much more has happened than when it was asked last.

    Args:
        queue: The queue's name.
        count: Called with a counter, its labels and how much; by default whoever observes this process.
    """

    def __init__(self, queue: str, count: Count | None = None) -> None:
        self._queue, self._count = queue, count or _observe
        self._told: Counter[str] = Counter()

    def __call__(self, tally: Mapping[str, float]) -> None:
        for name in TALLIED:
            more = tally[name] - self._told[name]
            if more > 0:
                self._told[name] = tally[name]  # type: ignore[assignment]
                labels = {"queue": self._queue}
                if name in _COUNTERS:
                    self._try_to_count(_COUNTERS[name], labels, more)
                else:
                    self._try_to_count("samples", {**labels, "what": name}, more)

    def _try_to_count(self, name: str, labels: Mapping[str, str], value: float) -> None:
        try:
            self._count(name, labels, value)
        except Exception:  # what has been done must not look as if it had not been
            logger.warning("%s: %s can't be counted", self._queue, name, exc_info=True)


def _observe(name: str, labels: Mapping[str, str], value: float) -> None:
    if (observer := observed.by) is not None:
        observer.counted(name, labels, value)


@contextmanager
def waiting(queue: str, what: str, n: int) -> Iterator[None]:
    """Tell whoever observes this process how long a put or a get took."""
    began = time.monotonic()
    try:
        yield
    finally:
        if (observer := observed.by) is not None:
            observer.spanned(Span("samples", queue, what, "waiting", began, time.monotonic(), {"samples": n}))
