"""What a pool collects, for those who take it."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

from raycrew.worker_groups._calls import Results
from raycrew.worker_groups.errors import WorkerGroupClosedError
from raycrew.worker_groups.rollouts._delivery import Delivery, Progress, in_hand
from raycrew.worker_groups.rollouts._engine import Engine
from raycrew.worker_groups.rollouts._telling import RolloutStats
from raycrew.worker_groups.rollouts._values import RolloutGroup


class RolloutCollection(Iterator[RolloutGroup], AsyncIterator[RolloutGroup]):
    """The rollouts of a stream of prompts, a prompt at a time as they are done: for `for` and `async for`.

    A prompt counts as taken once the next one is asked for, or the iteration is over: where a collection goes
    on in a folder, the one that was in hand before comes again. Closing gives up what is under way; whoever
    asks for the next one then, and had not got all, gets a `WorkerGroupClosedError`.
    """

    def __init__(self, engine: Engine, progress: Progress, delivery: Delivery) -> None:
        self._engine = engine
        self._closing = ExitStack()
        if delivery.jsonl is not None:
            self._closing.callback(delivery.jsonl.close)
        self._closing.callback(progress.close)
        self._closing.callback(engine.stop)
        self._results = Results(_groups(engine, progress, delivery, self._closing))
        weakref.finalize(self, self._closing.close).atexit = False
        engine.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RolloutGroup:
        self._engine.check_may_block()
        try:
            return next(self._results)
        except StopIteration:
            self._check_end()
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RolloutGroup:
        try:
            return await anext(self._results)
        except StopAsyncIteration:
            self._check_end()
            raise

    def _check_end(self) -> None:
        """Make sure that the iteration is over as there is nothing more, not as somebody has closed it."""
        if not self._engine.is_finished:
            raise WorkerGroupClosedError("the collection was closed before its end")

    def run(self) -> RolloutStats:
        """Take all that there is and will be; for rollouts that go to a file or a queue.

        Returns:
            What has become of them.
        """
        with self:
            for _ in self:
                pass
            return self.stats()

    def stats(self) -> RolloutStats:
        """What has become of the rollouts so far, in this process."""
        return self._engine.stats()

    def close(self) -> None:
        """Give up what is under way; idempotent. What is done in a folder can be gone on with."""
        with suppress(ValueError):  # another thread is in it, and is told that its queue was closed
            self._results.close()
        self._closing.close()

    async def aclose(self) -> None:
        """The same as `close`, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def __reduce__(self) -> str:
        raise TypeError("a collection of rollouts stays in its process and can't be pickled")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _groups(
    engine: Engine, progress: Progress, delivery: Delivery, closing: ExitStack
) -> Generator[RolloutGroup, None, None]:
    with closing:
        while (batch := progress.take()) is not None:
            with in_hand(batch) as done:
                yield delivery.deliver(done)
            engine.handed_out()
        engine.finish()
