"""What has become of rollouts so far: counted here, and told to whoever observes this process."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from raycrew.worker_groups._health import Span, observed


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """What has become of the rollouts of a collection, in this process.

    Attributes:
        pulled: Prompts that came from the stream.
        skipped: Of those, how many were done before.
        in_flight: Prompts whose rollouts are under way.
        oldest_s: Since when the oldest of those is, in seconds.
        waiting: Prompts that are done, and that nobody has taken yet.
        handed_out: Prompts that were handed out, or written where they were to go.
        produced: Rollouts that gave a sample.
        failed: Rollouts that failed as often as they were tried.
        retried: How often one was tried again.
        seconds: From the pulling of a prompt to the end of its last rollout, in all.
    """

    pulled: int = 0
    skipped: int = 0
    in_flight: int = 0
    oldest_s: float = 0.0
    waiting: int = 0
    handed_out: int = 0
    produced: int = 0
    failed: int = 0
    retried: int = 0
    seconds: float = 0.0

    @property
    def mean_s(self) -> float:
        """How long a prompt took, on average, in seconds."""
        done = self.pulled - self.skipped - self.in_flight
        return self.seconds / done if done > 0 else 0.0


class Tally:
    """Counts what becomes of rollouts; thread-safe.

    Args:
        pool: The pool's name.
        clock: The monotonic clock.
    """

    def __init__(self, pool: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool, self._clock = pool, clock
        self._counts: Counter[str] = Counter()
        self._begun: dict[str, float] = {}
        self._seconds = 0.0
        self._lock = threading.Lock()

    def count(self, what: str, n: int = 1) -> None:
        """Something has happened to that many."""
        with self._lock:
            self._counts[what] += n
        if n and (observer := observed.by) is not None:
            observer.counted("rollouts", {"pool": self._pool, "what": what}, n)

    def begin(self, prompt: str) -> float:
        """A prompt's rollouts begin; when."""
        with self._lock:
            began = self._begun[prompt] = self._clock()
        return began

    def end(self, prompt: str, produced: int, failed: int) -> None:
        """A prompt's rollouts have ended, so many well."""
        now = self._clock()
        with self._lock:
            began = self._begun.pop(prompt)
            self._seconds += now - began
        self.count("done")
        self.count("produced", produced)
        self.count("failed", failed)
        if (observer := observed.by) is not None:
            detail = {"produced": produced, "failed": failed}
            observer.spanned(Span("rollouts", self._pool, prompt, "running", began, now, detail))
            observer.counted("rollout_seconds", {"pool": self._pool}, now - began)

    def stats(self, in_hand: int) -> RolloutStats:
        """All of it, where so many prompts are under way or wait."""
        with self._lock:
            oldest = min(self._begun.values(), default=None)
            return RolloutStats(
                in_flight=len(self._begun),
                oldest_s=0.0 if oldest is None else self._clock() - oldest,
                waiting=max(0, in_hand - len(self._begun)),
                seconds=self._seconds,
                **{what: self._counts[what] for what in _COUNTED},
            )


_COUNTED = ("pulled", "skipped", "handed_out", "produced", "failed", "retried")
