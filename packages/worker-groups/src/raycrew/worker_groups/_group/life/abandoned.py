"""Groups that nobody ended: what they hold is given back by a thread of its own.

The garbage collector runs in any thread, between any two steps of it and under any lock. So all that it does
is to put a note into a queue that allows this; the thread that reads it was started with the first group.
"""

import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

from raycrew.worker_groups._group.life.waiting_for import is_done
from raycrew.worker_groups._ray import PerProcess

logger = logging.getLogger(__name__)

_notes: SimpleQueue[Callable[[], None]] = SimpleQueue()
_lock = PerProcess(threading.Lock)
_threads: list[threading.Thread] = []
os.register_at_fork(after_in_child=_threads.clear)


class InUse:
    """Stands for the use of something: held by all objects through which it can be used."""

    __slots__ = ("__weakref__",)


def watch_over(in_use: InUse, what: str, give_back: Callable[[], object]) -> Callable[[], object]:
    """Have something given back once nobody holds what stands for its use any more.

    At the end of the interpreter nothing is given back: Ray ends what its driver leaves.

    Args:
        in_use: Stands for its use.
        what: What is given back, for the `ResourceWarning`.
        give_back: Gives it back, within bounded time; must not hold that.

    Returns:
        Ends the watch.
    """
    with _lock.here:
        if not any(thread.is_alive() for thread in _threads):
            _threads[:] = [threading.Thread(target=_read_notes, name="raycrew-abandoned", daemon=True)]
            _threads[0].start()
    watch = weakref.finalize(in_use, _notes.put, _Abandoned(what, give_back))
    watch.atexit = False
    return watch.detach


def catch_up(timeout_s: float) -> bool:
    """Wait until all that is abandoned by now was given back; says whether it was in time."""
    if not _threads:
        return True
    caught_up = Future[None]()
    _notes.put(partial(caught_up.set_result, None))
    return is_done(caught_up, timeout_s)


class _Abandoned:
    def __init__(self, what: str, give_back: Callable[[], object]) -> None:
        self._what, self._give_back, self._pid = what, give_back, os.getpid()

    def __call__(self) -> None:
        if os.getpid() != self._pid:  # a forked process leaves alone what is its parent's
            return
        text = f"{self._what} went out of scope and was not shut down; it is now"
        try:
            warnings.warn(text, ResourceWarning, stacklevel=2)
        except ResourceWarning:  # where warnings are errors, this one has nobody to go to
            logger.warning("%s", text)
        self._give_back()


def _read_notes() -> None:
    while True:
        note = _notes.get()
        try:
            note()
        except Exception:
            logger.exception("what nobody shut down could not be given back")
        del note
