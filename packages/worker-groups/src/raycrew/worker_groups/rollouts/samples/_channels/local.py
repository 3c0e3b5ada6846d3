"""How requests reach a queue's keeper, and who waits there until one is possible."""

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from raycrew.worker_groups.errors import SampleQueueClosedError, SampleQueueTimeoutError
from raycrew.worker_groups.rollouts.samples._asking import Request
from raycrew.worker_groups.rollouts.samples._keeping import PLACE_S, Keeper

_LONGEST_S = 3600.0


class Channel(Protocol):
    """The way to a queue."""

    def ask(self, request: Request, timeout_s: float | None) -> Any:
        """Have an operation done as soon as it is possible.

        Raises:
            SampleQueueTimeoutError: It was not, in time.
            SampleQueueError: It never will be.
        """
        ...

    async def ask_async(self, request: Request, timeout_s: float | None) -> Any:
        """The same without blocking the event loop."""
        ...

    def tell(self, request: Request) -> None:
        """Have an operation done, and neither wait for it nor hear of it."""
        ...

    def close(self) -> None:
        """End the queue; idempotent."""
        ...


class LocalChannel:
    """To a keeper in this process.

    Args:
        keeper: It.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper, self._pid = keeper, os.getpid()

    def __reduce__(self) -> str:
        raise TypeError("this queue is of this process and can't be passed on")

    def ask(self, request: Request, timeout_s: float | None) -> Any:
        """See `Channel`."""
        deadline = deadline_in(timeout_s)
        if (answer := self._try(request)) is not None:
            return answer
        changed = threading.Event()
        try:
            self._keeper.listen(changed, changed.set)
            while (answer := self._try(request)) is None:
                changed.wait(self._wait_s(request, deadline))
                changed.clear()
            return answer
        finally:
            self._keeper.leave(changed, request.ticket)

    async def ask_async(self, request: Request, timeout_s: float | None, *, comes_again: bool = False) -> Any:
        """See `Channel`; who comes again at once with the same request keeps a place among those who wait."""
        deadline = deadline_in(timeout_s)
        if (answer := self._try(request)) is not None:
            return answer
        changed = asyncio.Event()
        try:
            self._keeper.listen(changed, _in_loop(changed.set))
            while (answer := self._try(request)) is None:
                wait_s = self._wait_s(request, deadline)
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):  # `wait_for` may swallow that we are cancelled
                        await changed.wait()
                changed.clear()
            return answer
        finally:
            self._keeper.leave(changed, None if comes_again else request.ticket)

    def tell(self, request: Request) -> None:
        """See `Channel`."""
        self._try(request)

    def close(self) -> None:
        """See `Channel`."""
        if os.getpid() == self._pid:  # else its lock may be held by a thread that there is not
            self._keeper.close()

    def _try(self, request: Request) -> Any:
        if os.getpid() != self._pid:
            raise SampleQueueClosedError("this queue is of the process that this one was forked from")
        return getattr(self._keeper, request.operation)(**request.current())

    def _wait_s(self, request: Request, deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise SampleQueueTimeoutError(self._keeper.why_not(request.operation, request.arguments))
        return min(left, self._keeper.next_end_s(), PLACE_S / 4 if request.ticket else _LONGEST_S)


def deadline_in(timeout_s: float | None) -> float:
    """When so many seconds are over, by the monotonic clock; never, for None.

    Raises:
        TypeError: It is no number.
        ValueError: It is not a number.
    """
    if timeout_s is None:
        return math.inf
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise TypeError(f"timeout_s is a number of seconds, or None, not {timeout_s!r}")
    if math.isnan(timeout_s):
        raise ValueError("timeout_s is a number of seconds, or None for no limit, got nan")
    return time.monotonic() + timeout_s


def _in_loop(call: Callable[[], object]) -> Callable[[], None]:
    """The function, called in the running event loop by whichever thread."""
    loop = asyncio.get_running_loop()

    def call_in_loop() -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(call)

    return call_in_loop
