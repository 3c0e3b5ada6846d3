"""Prompts from a stream, one at a time and only when one is asked for, with their ids."""

import asyncio
import threading
from collections.abc import AsyncIterable, Callable, Iterable
from concurrent.futures import Future
from operator import index
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from ray import cloudpickle

from raycrew.worker_groups._calls import refuse_as_items
from raycrew.worker_groups.balancing import LATER
from raycrew.worker_groups.rollouts.errors import PromptError

END: Final = object()
#: So long a stream that has just been asked may take before others are looked after.
_MOMENT_S = 0.02


class Identified(NamedTuple):
    """A prompt.

    Attributes:
        id: Its.
        data: It, pickled.
    """

    id: str
    data: bytes


def check_prompts(prompts: Any, ids: Any) -> None:
    """Make sure that something is a stream of prompts, and something else gives ids of them.

    Raises:
        TypeError: It is not, or does not.
    """
    refuse_as_items(prompts, "prompts")
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable | AsyncIterable):
        raise TypeError(f"prompts are an iterable or async iterable, not {type(prompts).__name__}")
    if ids is not None and not callable(ids):
        raise TypeError(f"ids is a function of a prompt that gives its id, not {ids!r}")


class Prompts:
    """A stream, which is read in a thread of its own, or an async one in the loop of whoever collects.

    Args:
        prompts: The stream.
        ids: Gives a prompt's id; None for its position.
        on_ready: Called in any thread when the prompt that was asked for is there.
    """

    def __init__(
        self,
        prompts: Iterable[Any] | AsyncIterable[Any],
        ids: Callable[[Any], str | int] | None,
        on_ready: Callable[[], object],
    ) -> None:
        self._ids, self._on_ready = ids, on_ready
        self._ask, self._loop = _asking(prompts)
        self._coming: Future[Any] | None = None
        self._position = 0
        self._seen: set[str] = set()
        self.error: PromptError | None = None

    def next(self) -> Any:
        """The next prompt, `LATER` or `END`; what the stream raises ends it and is the `error`."""
        if self.error is not None:
            return END
        coming = self._coming
        if coming is None:
            coming = self._coming = self._ask()
            coming.add_done_callback(lambda _: self._on_ready())
            _wait_a_moment(coming)
        if not coming.done():
            return LATER
        self._coming = None
        try:
            prompt = coming.result()
            return END if prompt is END else self._identified(prompt)
        except BaseException as error:  # noqa: BLE001 - raised to whoever collects
            self.error = _told(error, self._position)
            return END

    def check_may_block(self) -> None:
        """Make sure that who waits here for a prompt does not hold up the loop that reads the stream.

        Raises:
            RuntimeError: This thread runs that loop.
        """
        if self._loop is not None and asyncio._get_running_loop() is self._loop:  # noqa: SLF001
            raise RuntimeError(
                "the prompts are read in this event loop, which this would block: `async for` does not"
            )

    def _identified(self, prompt: Any) -> Identified:
        position, self._position = self._position, self._position + 1
        name = str(position) if self._ids is None else _checked(self._ids(prompt))
        if self._ids is not None:  # positions are different ones
            if name in self._seen:
                raise PromptError(f"the prompt at {position} has the id {name!r} of an earlier one")
            self._seen.add(name)
        return Identified(name, bytes(cloudpickle.dumps(prompt)))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Ask for nothing more."""
        if isinstance(self._ask, _InThread):
            self._ask.end()
        elif self._coming is not None:
            self._coming.cancel()


def _told(error: BaseException, position: int) -> PromptError:
    if isinstance(error, PromptError):
        return error
    told = PromptError(f"the stream of prompts failed after {position}: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _checked(name: Any) -> str:
    if not isinstance(name, bool) and hasattr(name, "__index__"):
        return str(index(name))
    if not isinstance(name, str) or not name:
        raise TypeError(f"the id of a prompt is a string or a whole number, not {name!r}")
    return str(name)


def _wait_a_moment(coming: "Future[Any]") -> None:
    ready = threading.Event()
    coming.add_done_callback(lambda _: ready.set())
    ready.wait(_MOMENT_S)


def _asking(
    prompts: Iterable[Any] | AsyncIterable[Any],
) -> "tuple[Callable[[], Future[Any]], asyncio.AbstractEventLoop | None]":
    """What asks for the next one, and the loop that reads the stream, where it is not a thread of its own."""
    if isinstance(prompts, Iterable):
        items = iter(prompts)
        return _InThread(lambda _: next(items, END)), None
    coming = aiter(prompts)

    async def take() -> Any:
        return await anext(coming, END)

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return _InThread(lambda runner: runner.run(take())), None
    return lambda: asyncio.run_coroutine_threadsafe(take(), loop), loop


class _InThread:
    """Takes the next of a stream in a thread of its own, which may block as long as it likes."""

    def __init__(self, take: Callable[[asyncio.Runner], Any]) -> None:
        self._take = take
        self._steps: SimpleQueue[Future[Any] | None] = SimpleQueue()
        threading.Thread(target=self._walk, name="raycrew-prompts", daemon=True).start()

    def __call__(self) -> "Future[Any]":
        step: Future[Any] = Future()
        self._steps.put(step)
        return step

    def end(self) -> None:
        """Take nothing more after what is being taken."""
        self._steps.put(None)

    def _walk(self) -> None:
        with asyncio.Runner() as runner:  # has no loop until it is used
            while (step := self._steps.get()) is not None:
                try:
                    step.set_result(self._take(runner))
                except BaseException as error:  # noqa: BLE001 - raised to whoever collects
                    step.set_exception(error)
