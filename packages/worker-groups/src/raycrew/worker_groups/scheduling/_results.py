"""What becomes of an engine's calls: which have begun, and what they give, also where that is waited for."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Lock
from typing import Any

import ray

from raycrew.worker_groups._calls import MultiWorkerFuture, refuse_stream
from raycrew.worker_groups._ray import current_session

_MOST_ENDED = 1000


class Begun:
    """Which calls have begun: all that are under way, and the last thousand of those that have ended.

    Senders count their calls (`sender-7`): what may have been forgotten is told to have begun. Thread-safe.
    """

    def __init__(self) -> None:
        self._under_way: set[str] = set()
        self._ended: dict[str, None] = {}  # in order
        self._forgotten: dict[str, int] = {}
        self._lock = Lock()

    def __contains__(self, number: str) -> bool:
        sender, count = _counted(number)
        with self._lock:
            known = number in self._under_way or number in self._ended
            return known or count <= self._forgotten.get(sender, -1)

    @contextmanager
    def under_way(self, number: str) -> Iterator[None]:
        """Within, a call runs."""
        with self._lock:
            self._under_way.add(number)
        try:
            yield
        finally:
            with self._lock:
                self._under_way.discard(number)
                self._ended[number] = None
                if len(self._ended) > _MOST_ENDED:
                    sender, count = _counted(oldest := next(iter(self._ended)))
                    del self._ended[oldest]
                    self._forgotten[sender] = max(count, self._forgotten.get(sender, 0))


def _counted(number: str) -> tuple[str, int]:
    sender, _, count = number.rpartition("-")
    return sender, int(count) if count.isdecimal() else 0


class _LeftError(Exception):
    """A coroutine raised `SystemExit`, which would stop the loop with tasks half done."""


async def _no_exit(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except SystemExit as error:
        raise _LeftError from error


async def _result_of(awaitable: Awaitable[Any], timeout_s: float | None) -> Any:
    return await asyncio.wait_for(_no_exit(awaitable), timeout_s)


def awaited(result: Any, timeout_s: float | None, loop: Callable[[], asyncio.AbstractEventLoop]) -> Any:
    """The value that a result is, or becomes: of a future, an ObjectRef, a coroutine, another group's call.

    Args:
        result: What a method has returned.
        timeout_s: How long to wait for it; None for no limit.
        loop: Gives the event loop on which coroutines run; it is running nowhere.

    Raises:
        TimeoutError: It is not there in time; a coroutine is cancelled.
        TypeError: It is a generator.
        RuntimeError: It is a future of another loop, which isn't running.
    """
    value = _value_of(result, timeout_s, loop)
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise TypeError("this gives a generator, whose items can't be sent one by one: return a list of them")
    return value


def _value_of(result: Any, timeout_s: float | None, loop: Callable[[], asyncio.AbstractEventLoop]) -> Any:
    if isinstance(result, MultiWorkerFuture):
        refuse_stream(result)
        return result.get_results(timeout=timeout_s)
    if isinstance(result, ray.ObjectRef):
        return current_session().get(result, timeout=timeout_s)
    if isinstance(result, Future):
        return result.result(timeout_s)
    if isinstance(result, asyncio.Future) and result.get_loop().is_running():  # an engine's own, in a thread
        there = asyncio.run_coroutine_threadsafe(_result_of(result, timeout_s), result.get_loop())
        return there.result(timeout_s)
    if isinstance(result, asyncio.Future) and not result.done() and result.get_loop() is not loop():
        raise RuntimeError("this gives a future of an event loop that isn't running: run it in a thread")
    if inspect.isawaitable(result):
        try:
            return loop().run_until_complete(_result_of(result, timeout_s))
        except _LeftError as left:
            raise (left.__cause__ or left) from None
    return result
