"""Looks at what workers use while phases go on, by a thread that ends with them."""

import logging
import threading
import time
from collections.abc import Callable

from raycrew.worker_groups._group.phases.marks import Look, PhaseUse

logger = logging.getLogger(__name__)


class Looking:
    """The marks of all phases; one phase goes on at a time, or none.

    Args:
        look: Tells what the ranks of all members use.
        every_s: Between two looks of the thread; None for no looks.
    """

    def __init__(self, look: Callable[[], Look], every_s: float | None) -> None:
        self._look, self._every_s = look, every_s
        self._lock = threading.Lock()
        self._phases: dict[str, PhaseUse] = {}
        self._now: tuple[str, float] | None = None
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, phase: str) -> None:
        """From now on it is this phase; the one before is over."""
        self._see()
        with self._lock:
            self._go_on()
            self._phases[phase] = self._phases.get(phase, PhaseUse()).begun()
            self._now = (phase, time.monotonic())
        if self._every_s is not None and self._thread is None:
            self._ends = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._ends,), name="phases", daemon=True)
            self._thread.start()
        self._see()

    def end(self) -> None:
        """The phase is over, and the thread ends."""
        try:
            self._see()
        finally:
            self._ends.set()
            with self._lock:
                self._go_on()
                self._now = None
            if (thread := self._thread) is not None:
                self._thread = None
                thread.join()

    def phases(self) -> dict[str, PhaseUse]:
        """All of them so far."""
        with self._lock:
            self._go_on()
            return dict(self._phases)

    def _go_on(self) -> None:
        if self._now is not None:
            (phase, since), now = self._now, time.monotonic()
            self._phases[phase] = self._phases[phase].gone_on(now - since)
            self._now = (phase, now)

    def _run(self, ends: threading.Event) -> None:
        while not ends.wait(self._every_s):
            self._see()

    def _see(self) -> None:
        """Look, and take in what was seen if it was of one phase."""
        with self._lock:
            before = self._now
        if before is None or self._every_s is None:
            return
        try:
            look = self._look()
        except Exception:  # a group may end meanwhile, and phases go on without marks
            logger.debug("what workers use is not known", exc_info=True)
            return
        phase = before[0]
        with self._lock:
            if self._now is not None and self._now[0] == phase:
                self._phases[phase] = self._phases[phase].seen(look)
