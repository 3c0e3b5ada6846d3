"""What is done once, by whoever asks for it first, and again only where something of it is left to do."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any


class Once:
    """Of one thing, whichever threads ask for it.

    Args:
        lock: Held for a moment when it begins.
        begins: Called then.
        is_over: Called when it is over, well or not.
    """

    def __init__(
        self, lock: AbstractContextManager[Any], begins: Callable[[], object], is_over: Callable[[], object]
    ) -> None:
        self._lock, self._begins, self._is_over = lock, begins, is_over
        self._last: Future[bool] | None = None
        self._doer = 0

    def do(self, work: Callable[[], bool], left: Callable[[], bool] | None = None) -> bool:
        """Do it; where another thread does, wait for it and give its outcome.

        Where it was interrupted, by Ctrl-C, say, who waits or comes later does it again.

        Args:
            work: Does it.
            left: Whether it did not do all, so that it is done again for who comes later.

        Returns:
            What `work` returned; False when it has raised before, or when `work` itself asks.
        """
        outcome = Future[bool]()
        try:
            while (last := self._begin(outcome, left)) is not None:
                if last.done():
                    return last.exception() is None and last.result()
                if self._doer == threading.get_ident():
                    return False  # a signal handler, or what is done itself, can't wait for it
                if not _is_interrupted(last):
                    return last.result()
            outcome.set_result(work())
        except BaseException as error:
            if self._last is outcome and not outcome.done():
                outcome.set_exception(error)  # to all who wait
            raise
        finally:
            if self._last is outcome:
                self._is_over()
        return outcome.result()

    def _begin(self, outcome: "Future[bool]", left: Callable[[], bool] | None) -> "Future[bool] | None":
        """Begin it, unless somebody else does, or has done it: that is given then."""
        with self._lock:
            last = self._last
            if last is not None and not (last.done() and (_is_interrupted(last) or (left or bool)())):
                return last
            self._doer = threading.get_ident()
            self._last = outcome
            self._begins()
        return None


def _is_interrupted(outcome: "Future[bool]") -> bool:
    """Wait for an outcome; whether it is an interruption, by Ctrl-C, say: not what its own steps raise."""
    error = outcome.exception()
    return error is not None and not isinstance(error, Exception)
