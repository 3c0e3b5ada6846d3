"""A turn, as whoever takes it has it: a block, of a thread or of a task."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial

from raycrew.worker_groups._calls import in_thread, uninterrupted


class PhaseTurn:
    """A turn of a member, taken by `with` or `async with`; see `PhaseManager.turn`.

    A task that is cancelled while it waits gives the turn up; a step that has begun may then have been done
    or not, and is done again before the next turn.

    Args:
        enter: Waits for it; told who asks, and whether that may block.
        leave: Ends it; told the same.

    Raises:
        PhaseError: Another member could not be put to sleep, or this one not be woken; this thread or task is
            within a turn of another one; or `with` in a task would have to wait, and block its event loop.
        PhaseTimeoutError: It did not come in time.
    """

    def __init__(self, enter: Callable[[object, bool], None], leave: Callable[[object], None]) -> None:
        self._enter, self._leave = enter, leave
        self._inside: list[object] = []  # a block may be left elsewhere than it was entered

    def __enter__(self) -> None:
        me = whoever_asks()
        self._enter(me, may_block(me))
        self._inside.append(me)

    def __exit__(self, *_: object) -> None:
        self._leave(self._inside.pop())

    async def __aenter__(self) -> None:
        me = whoever_asks()
        await in_thread(partial(self._enter, me, True), undo=lambda _: self._leave(me))
        self._inside.append(me)

    async def __aexit__(self, *_: object) -> None:
        await uninterrupted(partial(self._leave, self._inside.pop()))


def whoever_asks() -> object:
    """The running task, or else the thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.current_thread() if task is None else task


def may_block(who: object) -> bool:
    """Whether who asks may wait here: a task would block its event loop."""
    return not isinstance(who, asyncio.Task)
