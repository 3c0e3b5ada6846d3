"""A transfer under way: a future that ends only when nobody writes to the caller's buffers any more."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from raycrew.tensor_transport.errors import (
    TransferCancelledError,
    TransportError,
    TransportTimeoutError,
)

_log = logging.getLogger(__name__)

Work = Callable[["Guard"], None]


class Guard:
    """What whoever moves bytes asks before each piece: may it go on, and for how long."""

    def __init__(self, what: str, timeout_s: float | None) -> None:
        self._what, self._timeout_s = what, _limit(timeout_s)
        self._deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        self._stop = threading.Event()
        self._why: Callable[[], TransportError] = self._cancelled
        self._wakers: list[Callable[[], object]] = []

    def stop(self, why: Callable[[], TransportError] | None = None) -> None:
        """Have `check` raise from now on, `TransferCancelledError` unless told otherwise; wake who waits.

        Several threads may check: each of them raises an error of its own.
        """
        if why is not None and not self._stop.is_set():
            self._why = why
        self._stop.set()
        for wake in tuple(self._wakers):
            wake()

    def on_stop(self, wake: Callable[[], object]) -> None:
        """Have something called when the transfer is cancelled: what ends a wait for a peer."""
        self._wakers.append(wake)
        if self._stop.is_set():
            wake()

    def check(self) -> None:
        """Return if another piece may be moved.

        Raises:
            TransferCancelledError: The transfer was cancelled.
            TransportClosedError: Its transport was closed.
            TransportTimeoutError: Its time is over.
        """
        if self._stop.is_set():
            raise self._why()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise self.too_late()

    def _cancelled(self) -> TransferCancelledError:
        return TransferCancelledError(f"{self._what} was cancelled")

    def left_s(self) -> float | None:
        """Seconds until the deadline, at least 0; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def too_late(self) -> TransportTimeoutError:
        """The error of a deadline that passed."""
        return TransportTimeoutError(f"{self._what} did not end within {self._timeout_s} s")


class Transfer:
    """A transfer that was begun. Wait for it with `wait()` or `await`; thread-safe.

    It has ended when it succeeded, failed, or a cancellation or deadline was heeded by whoever moves the
    bytes: from then on nothing is written to the buffers. Before anybody moves them it ends by itself.
    """

    def __init__(self, what: str, size_bytes: int, *, timeout_s: float | None = None) -> None:
        self.size_bytes = size_bytes
        self.guard = Guard(what, timeout_s)
        self._what = what
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._begun = False
        self._callbacks: list[Callable[[Transfer], object]] = []
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def stop(self, why: Callable[[], TransportError] | None = None) -> None:
        """Have it end soon, as `Guard.stop` says: for those who write transports."""
        self.guard.stop(why)
        try:
            self.guard.check()
        except TransportError as error:
            self._end(error, only_unbegun=True)

    def cancel(self) -> bool:
        """Have it end soon; False where it had ended already. `wait` then tells how it ended."""
        if self.done():
            return False
        self.stop()
        return True

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """How it failed, once it has ended; None if it did not.

        Raises:
            TransportTimeoutError: It has not ended within `timeout_s`. It goes on.
        """
        left_s, timeout_s = self.guard.left_s(), _limit(timeout_s)
        rest_s = timeout_s
        if left_s is not None and (timeout_s is None or left_s < timeout_s):
            if not self._ended.wait(left_s):
                self._end_late()
            rest_s = None if timeout_s is None else timeout_s - left_s
        if not self._ended.wait(rest_s):
            raise TransportTimeoutError(
                f"{self._what} goes on after {timeout_s} s: wait again, or cancel() it"
            )
        return self._error

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, and raise how it failed.

        Raises:
            TransferCancelledError: It was cancelled.
            TransportTimeoutError: Its own deadline passed; or `timeout_s` did, and it goes on.
            TransportError: It failed otherwise.
        """
        error = self.exception(timeout_s)
        if error is not None:
            raise error

    def add_done_callback(self, callback: Callable[["Transfer"], object]) -> None:
        """Have something called when it has ended, by the thread that ends it, or at once."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, None]:
        """Wait in an event loop. A task that is cancelled cancels the transfer, and waits for its end."""
        return self._until_ended().__await__()

    async def _until_ended(self) -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        self.add_done_callback(lambda _: _tell(loop, ended.set))
        cancelled: asyncio.CancelledError | None = None
        left_s = self.guard.left_s()
        late = None if left_s is None else loop.call_later(left_s, self._end_late)
        while not self.done():
            try:
                await ended.wait()
            except asyncio.CancelledError as error:
                cancelled = error
                self.cancel()
        if late is not None:
            late.cancel()
        if cancelled is not None:
            raise cancelled
        self.wait(0)

    def run(self, work: Work) -> None:
        """Do the work, and end: for those who write transports, in whatever thread moves the bytes."""
        if not self.begin():
            return
        try:
            self.guard.check()
            work(self.guard)
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            self.end(error)
        else:
            self.end()

    def begin(self) -> bool:
        """Note that bytes are moved from now on; False where it has ended: for those who write transports."""
        with self._lock:
            self._begun = not self._ended.is_set()
            return self._begun

    def leave_to_parent(self) -> None:
        """In a forked child, where nobody moves the bytes: it fails, unless it has ended."""
        done = self._ended.is_set()
        self._lock, self._ended, self._callbacks = threading.Lock(), threading.Event(), []
        if done:
            self._ended.set()
        why = f"{self._what} is process {os.getppid()}'s, from which this one was forked: begin another one"
        self._end(TransportError(why))

    def end(self, error: BaseException | None = None) -> None:
        """Note that nothing is written any more: for those who write transports."""
        if not self._end(error):
            raise TransportError(f"{self._what} has ended already")

    def _end_late(self) -> None:
        """Its time is over: it ends, unless somebody moves bytes, who heeds that."""
        self._end(self.guard.too_late(), only_unbegun=True)

    def _end(self, error: BaseException | None, *, only_unbegun: bool = False) -> bool:
        with self._lock:
            if self._ended.is_set() or (only_unbegun and self._begun):
                return False
            self._error = error
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # noqa: BLE001 - the transfer ended, whatever a listener does
                _log.exception("a callback of %s failed", self._what)
        return True


def _limit(timeout_s: float | None) -> float | None:
    """A time as threads can wait it; None where it is longer, as infinity is."""
    return None if timeout_s is None or timeout_s > threading.TIMEOUT_MAX else timeout_s


def _tell(loop: asyncio.AbstractEventLoop, fn: Callable[[], object]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(fn)
