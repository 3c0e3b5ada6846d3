"""What nobody gave back goes back after it was forgotten, by a thread of its own.

The garbage collector runs in any thread, between any two steps of it and under any lock. So all that happens
there is a warning and a note in a queue that allows this.
"""

import atexit
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from raycrew.cluster_core._ray import PerProcess

logger = logging.getLogger(__name__)

_EXIT_S = 5.0

_Note = tuple[str, Callable[[], object]]


def give_back_when_forgotten(
    thing: object, what: str, give_back: Callable[[], object], is_held: Callable[[], bool]
) -> Callable[[], object]:
    """Give something back after a thing was forgotten, with a `ResourceWarning`; not at the process's end.

    Args:
        thing: What may be forgotten; the functions must not hold it.
        what: What happened then, for the warning.
        give_back: Gives it back.
        is_held: Whether there is anything to give back; may neither wait nor call Ray.

    Returns:
        Called when it was given back: nothing happens any more.
    """
    _reaper.start()
    watch = weakref.finalize(thing, _forgotten, what, give_back, is_held, os.getpid())
    watch.atexit = False
    return watch.detach


def _forgotten(what: str, give_back: Callable[[], object], is_held: Callable[[], bool], pid: int) -> None:
    """Runs in the middle of anything, so that it may neither wait nor call Ray."""
    if is_held() and os.getpid() == pid:
        _reaper.notes.put((what, give_back))
        warnings.warn(what, ResourceWarning, stacklevel=2)


class _Reaper:
    """A daemon thread that gives back what was forgotten, and ends before Ray does."""

    def __init__(self) -> None:
        self.notes: SimpleQueue[_Note | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = PerProcess(threading.Lock)

    def start(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        with self._lock.here:
            if self._thread is None:
                atexit.register(self._finish)  # Before Ray's own, which was registered earlier.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="raycrew-forgotten", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (note := self.notes.get()) is not None:
            what, give_back = note
            try:
                give_back()
            except Exception:
                logger.exception("%s: that failed", what)
            del note, give_back

    def _finish(self) -> None:
        self.notes.put(None)
        if self._thread is not None:
            self._thread.join(_EXIT_S)


_reaper = _Reaper()
