"""Which rollout has begun a task of an event loop."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from raycrew.worker_groups.rollouts._values import CurrentRollout


class Owners:
    """Of the tasks of a loop: those of rollouts, and those that these have begun (`asyncio.gather` does).

    Args:
        current: Which rollout the running code is of.
    """

    def __init__(self, current: ContextVar[CurrentRollout]) -> None:
        self._current = current
        self._of: WeakKeyDictionary[asyncio.Future[Any], CurrentRollout] = WeakKeyDictionary()
        self._loop: asyncio.AbstractEventLoop | None = None

    def observe(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note who begins tasks of a loop from now on."""
        if loop is self._loop:
            return
        self._loop = loop
        make: Callable[..., asyncio.Future[Any]] = loop.get_task_factory() or _task

        def made(in_loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Future[Any]:
            task = make(in_loop, coroutine, **options)
            if (owner := self._current.get(None)) is not None:
                self._of[task] = owner
            return task

        loop.set_task_factory(made)

    def running(self) -> CurrentRollout | None:
        """Who has the loop now; asked from another thread."""
        task = None if self._loop is None else asyncio.current_task(self._loop)
        return None if task is None else self._of.get(task)

    def note(self, task: asyncio.Future[Any], owner: CurrentRollout) -> None:
        """A task is a rollout's."""
        self._of[task] = owner


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(coroutine, loop=loop, **options)
