"""What can be awaited more than once, made fit for whatever wants a coroutine."""

import asyncio
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

R_co = TypeVar("R_co", covariant=True)


class Awaited(Coroutine[Any, Any, R_co]):
    """An awaitable of which tasks can be made, as of a coroutine, and any number of them.

    Each task walks through an `__await__` of its own; where it is cancelled before its first step, that is
    not entered, and `_give_up` is called in its place.
    """

    _walks: WeakKeyDictionary[asyncio.Task[Any], Generator[Any, Any, R_co]] | None = None

    def send(self, value: Any) -> Any:
        """Go on to where the current task waits next."""
        return self._walk().send(value)

    def throw(
        self,
        kind: Any,
        value: BaseException | object | None = None,
        trace: TracebackType | None = None,
    ) -> Any:
        """Raise something where the current task waits."""
        begun = list(self._walks or ())
        walk = self._walk()
        if asyncio.current_task() not in begun:
            self._give_up()
        return walk.throw(kind) if value is None and trace is None else walk.throw(kind, value, trace)

    def close(self) -> None:
        """Nothing is held that a task would not end by itself."""

    def _give_up(self) -> None:
        """A task that is cancelled never began to wait."""

    def _walk(self) -> Generator[Any, Any, R_co]:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("what is awaited here runs in a task: await it, or make a task of it")
        if self._walks is None:
            self._walks = WeakKeyDictionary()
        if task not in self._walks:
            self._walks[task] = self.__await__()
        return self._walks[task]
