"""Ends a worker's process from inside, where its event loop is blocked or gone and nobody comes to end it."""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


def end_this_process() -> None:
    """At once, whatever its threads are at."""
    os.kill(os.getpid(), signal.SIGKILL)


class Watchdog:
    """Of one process; its thread begins with the first thing that it watches over.

    Args:
        is_dead: Whether what is watched over can never be over, as its event loop has ended.
        end: Called where something is not over in time, or never will be.
    """

    def __init__(self, is_dead: Callable[[], bool], end: Callable[[], object] = end_this_process) -> None:
        self._is_dead, self._end, self._lock, self._thread = is_dead, end, threading.Lock(), None
        self._latest: dict[object, float] = {}

    _thread: threading.Thread | None

    def begin(self, within_s: float | None) -> object:
        """Something has begun, and is over within so many seconds; gives what `over` is told then."""
        key = object()
        with self._lock:
            self._latest[key] = math.inf if within_s is None else time.monotonic() + within_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="raycrew-watchdog", daemon=True)
                self._thread.start()
        return key

    def over(self, key: object) -> None:
        """It is over; idempotent."""
        with self._lock:
            self._latest.pop(key, None)

    @contextmanager
    def until(self, within_s: float | None) -> Iterator[None]:
        """What is in here is over within so many seconds; None for as long as it takes."""
        key = self.begin(within_s)
        try:
            yield
        finally:
            self.over(key)

    def _watch(self) -> None:
        was_dead = False
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                first = min(self._latest.values(), default=None)
            is_dead = first is not None and self._is_dead()
            if is_dead and was_dead:
                logger.critical(
                    "a rollout has ended its worker's event loop (sys.exit in a task?): ending it all"
                )
                self._end()
            elif first is not None and first < time.monotonic():
                logger.critical(
                    "a rollout did not end in time, nor when it was cancelled: ending its process"
                )
                self._end()
            was_dead = is_dead
