"""What a method of an engine returns: the value, or what will be one, which is waited for."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import ray

from raycrew.worker_groups._calls import MultiWorkerFuture, refuse_stream
from raycrew.worker_groups._ray import current_session


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
