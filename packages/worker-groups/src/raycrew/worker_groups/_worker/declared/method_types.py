"""What type checkers make of a worker's methods, as they are and as decorators make them."""

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
L_co = TypeVar("L_co", covariant=True)
J_co = TypeVar("J_co", covariant=True)


class DeclaredMethod(Protocol[P, L_co, R_co, J_co]):
    """A method that says how a group calls it; on an object, it is what it was.

    Its type has the parameters, what a call on an object gives, each rank's result, and the joined value.
    """

    # Without `__call__`: as a callable too, several overloads of `group.call` would take it.

    @overload
    def __get__(self, worker: None, cls: type, /) -> "DeclaredMethod[P, L_co, R_co, J_co]": ...

    @overload
    def __get__(self, worker: object, cls: type | None = None, /) -> Callable[P, L_co]: ...

    def _of_types(self) -> tuple[R_co, J_co]: ...


#: By parameters and result: a coroutine function, a function, and whatever holds its result within.
AsyncMethod = Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]
SyncMethod = Callable[Concatenate[Any, P], R]
AsyncOrDeclared = DeclaredMethod[P, Any, R, Any] | AsyncMethod[P, R]

#: What a coroutine method gives on an object.
Local = Coroutine[Any, Any, R]


class GivesOne(Protocol):
    """Makes methods whose value has the type of each result."""

    @overload
    def __call__(self, method: AsyncMethod[P, R], /) -> DeclaredMethod[P, Local[R], R, R]: ...

    @overload
    def __call__(self, method: SyncMethod[P, R], /) -> DeclaredMethod[P, R, R, R]: ...


class GivesMean(Protocol):
    """Makes methods whose value is the mean of the results: of integers a float, else of the same type."""

    @overload
    def __call__(self, method: AsyncMethod[P, int], /) -> DeclaredMethod[P, Local[int], int, float]: ...

    @overload
    def __call__(self, method: AsyncMethod[P, R], /) -> DeclaredMethod[P, Local[R], R, R]: ...

    @overload
    def __call__(self, method: SyncMethod[P, int], /) -> DeclaredMethod[P, int, int, float]: ...

    @overload
    def __call__(self, method: SyncMethod[P, R], /) -> DeclaredMethod[P, R, R, R]: ...


class GivesList(Protocol):
    """Makes methods whose value is the list of results."""

    @overload
    def __call__(self, method: AsyncMethod[P, R], /) -> DeclaredMethod[P, Local[R], R, list[R]]: ...

    @overload
    def __call__(self, method: SyncMethod[P, R], /) -> DeclaredMethod[P, R, R, list[R]]: ...


class GivesMade(Protocol[R, J_co]):
    """Makes methods whose value is what a function makes of the list of results."""

    @overload
    def __call__(self, method: AsyncMethod[P, R], /) -> DeclaredMethod[P, Local[R], R, J_co]: ...

    @overload
    def __call__(self, method: SyncMethod[P, R], /) -> DeclaredMethod[P, R, R, J_co]: ...


class GivesListOfItems(Protocol):
    """As `GivesList`, for methods of which each rank gets items of the caller's arguments."""

    @overload
    def __call__(self, method: AsyncMethod[P, R], /) -> DeclaredMethod[..., Local[R], R, list[R]]: ...

    @overload
    def __call__(self, method: SyncMethod[P, R], /) -> DeclaredMethod[..., R, R, list[R]]: ...
