"""While a worker's class hears of a new generation: no other call of the worker runs meanwhile."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from raycrew.worker_groups.errors import WorkerGroupError

#: A method that a worker class may have: called after its `__init__`, and at every new generation.
HOOK = "on_generation"


class Hearing:
    """Of one worker; for its threads and event loops alike."""

    def __init__(self) -> None:
        self._over: Future[None] | None = None

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Within, the worker's class hears of a generation."""
        over = self._over = Future[None]()
        try:
            yield
        finally:
            self._over = None
            over.set_result(None)

    def await_end(self) -> None:
        """Wait in a thread until it is over.

        Raises:
            WorkerGroupError: This is an event loop, which it needs itself, perhaps.
        """
        if (over := self._over) is None:
            return
        if _is_loop():
            raise WorkerGroupError(
                f"this worker's {HOOK} still runs; its methods that aren't async can't wait"
            )
        over.result()

    async def ended(self) -> None:
        """Wait in a coroutine until it is over."""
        while (over := self._over) is not None:
            await asyncio.shield(asyncio.wrap_future(over))


def _is_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
