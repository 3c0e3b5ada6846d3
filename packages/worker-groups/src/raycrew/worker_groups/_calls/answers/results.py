"""Results that come one by one, for a loop that blocks and for one that awaits."""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from queue import SimpleQueue
from typing import Any, Final, Self, TypeVar

from raycrew.cluster_core import Session

T = TypeVar("T")

_END: Final = object()


class Results(Iterator[T], AsyncIterator[T]):
    """Results as they come, in `for` or in `async for`.

    In `async for` a thread of its own waits for each result, so that the event loop goes on. Where the
    awaiting task is cancelled, the result that was awaited is not lost: it is the next one's. Closing gives
    up what is left; so does leaving the last reference to the garbage collector.
    """

    def __init__(self, source: Generator[T, None, None]) -> None:
        self._source = source
        self._steps: SimpleQueue[Future[Any] | None] | None = None
        self._given_up = threading.Event()
        self._step: Future[Any] | None = None
        self._awaited = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._step is None:
            return next(self._source)
        value = self._taken(self._step)  # an `async for` awaited it, and was cancelled
        if value is _END:
            raise StopIteration
        return value  # type: ignore[no-any-return]

    def close(self) -> None:
        """Give up what is left; an `async for` that goes on ends."""
        if self._steps is None:
            self._source.close()
        else:
            self._end_thread(self._steps, self._given_up)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._awaited:
            raise RuntimeError("another task awaits the next of these results; each of them goes to one task")
        if self._given_up.is_set():
            raise StopAsyncIteration
        self._awaited = True
        try:
            if self._step is None:
                self._step = Future()
                self._queue().put(self._step)
            await _done(self._step)
        finally:
            self._awaited = False
        value = self._taken(self._step)
        if value is _END:
            raise StopAsyncIteration
        return value  # type: ignore[no-any-return]

    def _taken(self, step: "Future[Any]") -> Any:
        """What a step gave; after the last one its thread has ended."""
        error, self._step = step.exception(), None
        if error is not None or step.result() is _END:
            self._given_up.set()
        return step.result()

    async def aclose(self) -> None:
        """The same as `close`."""
        self.close()

    def _queue(self) -> "SimpleQueue[Future[Any] | None]":
        if self._steps is None:
            self._steps = SimpleQueue()
            arguments = (self._source, self._steps, self._given_up)
            _start("raycrew-results", _walk, *arguments)
            weakref.finalize(self, self._end_thread, self._steps, self._given_up).atexit = False
        return self._steps

    @staticmethod
    def _end_thread(steps: "SimpleQueue[Future[Any] | None]", given_up: threading.Event) -> None:
        given_up.set()
        steps.put(None)


def _walk(
    source: Generator[Any, None, None], steps: "SimpleQueue[Future[Any] | None]", given_up: threading.Event
) -> None:
    """Take the next of the results for each step that is asked for, until there are none."""
    with Session.until_set(given_up), closing(source):
        while (step := steps.get()) is not None:
            try:
                value = next(source, _END)
            except BaseException as error:  # noqa: BLE001 - raised in the task that awaits it
                if given_up.is_set():
                    step.set_result(_END)
                else:
                    step.set_exception(error)
                return
            step.set_result(value)
            if value is _END:
                return
            del step, value


async def uninterrupted(work: Callable[[], T]) -> T:
    """What `work` returns, done by a thread of its own to its end; being cancelled waits for that."""
    outcome = Future[T]()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised in the task that awaits it
            outcome.set_exception(error)

    _start("raycrew-awaited", run)
    try:
        await _done(outcome)
    except asyncio.CancelledError:
        await _done(outcome)
        raise
    return outcome.result()


async def in_thread(work: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """What `work` returns, done by a thread of its own; being cancelled gives it up, and waits for its end.

    Args:
        work: Called in the thread; its waits for Ray end with an `asyncio.CancelledError` once given up.
        undo: Called with what it made, if it was made all the same.
    """
    given_up, settling, outcome = threading.Event(), threading.Lock(), Future[T]()

    def run() -> None:
        try:
            with Session.until_set(given_up):
                made = work()
            with settling:
                if not given_up.is_set():
                    outcome.set_result(made)
                    return
            undo(made)
            outcome.set_result(made)
        except BaseException as error:  # noqa: BLE001 - raised in the task that awaits it
            outcome.set_exception(error)

    _start("raycrew-awaited", run)
    try:
        await _done(outcome)
    except asyncio.CancelledError:
        with settling:
            given_up.set()
            is_made = outcome.done() and outcome.exception() is None
        if is_made:  # at the last moment, and nobody has it
            await uninterrupted(lambda: undo(outcome.result()))
        else:
            await _done(outcome)
        raise
    return outcome.result()


def _start(name: str, work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, name=name, daemon=True).start()


async def _done(step: "Future[Any]") -> None:
    """Wait until it is done; being cancelled leaves it alone."""
    done = asyncio.Event()
    step.add_done_callback(waking(done))
    await done.wait()


def waking(event: asyncio.Event) -> Callable[[object], None]:
    """What sets an event of the running loop from any thread, also when that loop has ended."""
    loop = asyncio.get_running_loop()

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(event.set)

    return wake
