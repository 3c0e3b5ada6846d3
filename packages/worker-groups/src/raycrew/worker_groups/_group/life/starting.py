"""Groups that are made without blocking the event loop, by what looks like their constructor."""

import inspect
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

P = ParamSpec("P")
G = TypeVar("G")


class Starting(Generic[P]):
    """Makes a coroutine function the class method that has its class's parameters, for type checkers, too."""

    def __init__(self, init: Callable[Concatenate[Any, P], None]) -> None:
        self._init = init

    def __call__(self, start: Callable[..., Coroutine[Any, Any, Any]]) -> Self:
        self._start = start
        return self

    def __get__(self, group: object, made: Callable[..., G]) -> Callable[P, Coroutine[Any, Any, G]]:
        @wraps(self._start)
        async def start(*args: P.args, **kwargs: P.kwargs) -> G:
            return await self._start(made, *args, **kwargs)  # type: ignore[no-any-return]

        signature = inspect.signature(made).replace(return_annotation=Self)
        start.__signature__ = signature  # type: ignore[attr-defined]
        return start
