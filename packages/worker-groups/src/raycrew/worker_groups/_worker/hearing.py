"""While a worker's class hears of a new generation: no other call of the worker runs meanwhile."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from raycrew.worker_groups.errors import WorkerGroupError

#: A method that a worker class may have: called after its `__init__`, and at every new generation.
HOOK = "on_generation"


class Hearing:
    """Of one worker; for its threads and event loops alike.

    One that was late may still go on while the next one does, and each lasts until its own end.
    """

    def __init__(self) -> None:
        self._under_way: list[Future[None]] = []

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Within, the worker's class hears of a generation."""
        over = Future[None]()
        self._under_way.append(over)
        try:
            yield
        finally:
            self._under_way.remove(over)
            over.set_result(None)

    def await_end(self) -> None:
        """Wait in a thread until it is over.

        Raises:
            WorkerGroupError: This is an event loop, which it needs itself, perhaps.
        """
        while under_way := list(self._under_way):
            if _is_loop():
                raise WorkerGroupError(
                    f"this worker's {HOOK} still runs; its methods that aren't async can't wait"
                )
            under_way[-1].result()

    async def ended(self) -> None:
        """Wait in a coroutine until it is over."""
        while under_way := list(self._under_way):
            await asyncio.shield(asyncio.wrap_future(under_way[-1]))


def _is_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
