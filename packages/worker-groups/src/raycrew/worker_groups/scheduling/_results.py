"""What a method of an engine returns: the value, or what will be one, which is waited for."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import ray

from raycrew.worker_groups._calls import MultiWorkerFuture, refuse_stream
from raycrew.worker_groups._ray import current_session


async def _result_of(awaitable: Awaitable[Any], timeout_s: float | None) -> Any:
    return await asyncio.wait_for(awaitable, timeout_s)


def awaited(result: Any, timeout_s: float | None, loop: Callable[[], asyncio.AbstractEventLoop]) -> Any:
    """The value that a result is, or becomes: of a future, an ObjectRef, a coroutine, another group's call.

    Args:
        result: What a method has returned.
        timeout_s: How long to wait for it; None for no limit.
        loop: Gives the event loop on which coroutines run; it is running nowhere.

    Raises:
        TimeoutError: It is not there in time; a coroutine is cancelled.
    """
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
    if inspect.isawaitable(result):
        return loop().run_until_complete(_result_of(result, timeout_s))
    return result
