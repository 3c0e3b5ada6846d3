"""Ends a worker's process from inside, where its event loop is blocked and nobody else comes to end it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOOK_S = 1.0


def end_this_process() -> None:
    """At once, whatever its threads are at."""
    os.kill(os.getpid(), signal.SIGKILL)


class Watchdog:
    """Of one process; its thread begins with the first thing that it watches over.

    Args:
        end: Called where something is not over in time.
    """

    def __init__(self, end: Callable[[], object] = end_this_process) -> None:
        self._end, self._lock, self._thread = end, threading.Lock(), None
        self._latest: dict[object, float] = {}

    _thread: threading.Thread | None

    @contextmanager
    def until(self, within_s: float | None) -> Iterator[None]:
        """What is in here is over within so many seconds; None for as long as it takes."""
        key = object()
        if within_s is not None:
            with self._lock:
                self._latest[key] = time.monotonic() + within_s
                if self._thread is None:
                    self._thread = threading.Thread(target=self._watch, name="raycrew-watchdog", daemon=True)
                    self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._latest.pop(key, None)

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                is_late = min(self._latest.values(), default=float("inf")) < time.monotonic()
            if is_late:
                self._end()
