"""A method that is called as a constructor is."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def with_arguments_of(
    constructor: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., R]], Callable[Concatenate[S, P], R]]:
    """Let a method be called with a constructor's arguments, show these, and hand on all of them by name."""
    signature = inspect.signature(constructor)

    def decorate(method: Callable[..., R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            _, *given = bound.arguments.items()
            return method(self, **dict(given))

        returned = inspect.signature(method).return_annotation
        vars(call)["__signature__"] = signature.replace(return_annotation=returned)
        return call

    return decorate
