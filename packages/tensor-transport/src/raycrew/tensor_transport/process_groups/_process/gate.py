"""Calls that may never return, given up on at a deadline."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from raycrew.tensor_transport.errors import TransportTimeoutError

log = logging.getLogger(__name__)
T = TypeVar("T")

_JOIN_S = 5.0


class Gate:
    """Makes calls one after another in a daemon thread of its own.

    torch's store waits without a deadline for a host that is stopped, and a process group for a member that
    never connects: neither can be interrupted, so somebody else has to do the waiting.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._overdue = False
        self._name = name
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Have `call` made when its turn comes."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """`call()`, or an error at the deadline.

        Raises:
            TransportTimeoutError: It did not return in time, or an earlier one still has not.
        """
        if self._overdue:
            raise TransportTimeoutError(f"{self._name}: an earlier call has not returned")
        future = self.submit(call)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done():  # It came at the last moment, or is itself a timeout.
                return future.result()
            self._overdue = True
            raise TransportTimeoutError(f"{self._name}: no answer within {timeout_s:.3g} s") from error

    def close(self) -> None:
        """End the thread, unless a call keeps it; idempotent."""
        self._calls.put(None)
        if self._overdue or threading.current_thread() is self._thread:
            return
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            log.warning("%s: its thread still waits for a call to return", self._name)

    def abandon(self) -> None:
        """End the thread when the call that keeps it has returned, and do not wait for that."""
        self._overdue = True
        self._calls.put(None)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(error)
            del item, call, future  # or the thread would keep what they hold until the next call
