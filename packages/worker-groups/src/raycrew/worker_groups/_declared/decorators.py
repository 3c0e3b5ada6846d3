"""The decorators, and what type checkers make of the methods that have them."""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

from raycrew.worker_groups._declared.declaration import MODES, Declaration, Function, Mode, declare

P = ParamSpec("P")
R = TypeVar("R")
J = TypeVar("J")
R_co = TypeVar("R_co", covariant=True)
L_co = TypeVar("L_co", covariant=True)
J_co = TypeVar("J_co", covariant=True)

_OneValue = Literal["concat", "first", "sum"]


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


_Async = Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]
_Sync = Callable[Concatenate[Any, P], R]
_Local = Coroutine[Any, Any, R]


class GivesOne(Protocol):
    """Makes methods whose value has the type of each result."""

    @overload
    def __call__(self, method: _Async[P, R], /) -> DeclaredMethod[P, _Local[R], R, R]: ...

    @overload
    def __call__(self, method: _Sync[P, R], /) -> DeclaredMethod[P, R, R, R]: ...


class GivesMean(Protocol):
    """Makes methods whose value is the mean of the results: of integers a float, else of the same type."""

    @overload
    def __call__(self, method: _Async[P, int], /) -> DeclaredMethod[P, _Local[int], int, float]: ...

    @overload
    def __call__(self, method: _Async[P, R], /) -> DeclaredMethod[P, _Local[R], R, R]: ...

    @overload
    def __call__(self, method: _Sync[P, int], /) -> DeclaredMethod[P, int, int, float]: ...

    @overload
    def __call__(self, method: _Sync[P, R], /) -> DeclaredMethod[P, R, R, R]: ...


class GivesList(Protocol):
    """Makes methods whose value is the list of results."""

    @overload
    def __call__(self, method: _Async[P, R], /) -> DeclaredMethod[P, _Local[R], R, list[R]]: ...

    @overload
    def __call__(self, method: _Sync[P, R], /) -> DeclaredMethod[P, R, R, list[R]]: ...


class GivesMade(Protocol[R, J_co]):
    """Makes methods whose value is what a function makes of the list of results."""

    @overload
    def __call__(self, method: _Async[P, R], /) -> DeclaredMethod[P, _Local[R], R, J_co]: ...

    @overload
    def __call__(self, method: _Sync[P, R], /) -> DeclaredMethod[P, R, R, J_co]: ...


class GivesListOfItems(Protocol):
    """As `GivesList`, for methods of which each rank gets items of the caller's arguments."""

    @overload
    def __call__(self, method: _Async[P, R], /) -> DeclaredMethod[..., _Local[R], R, list[R]]: ...

    @overload
    def __call__(self, method: _Sync[P, R], /) -> DeclaredMethod[..., R, R, list[R]]: ...


@overload
def sharded(
    axis: str,
    /,
    *,
    split: str | Sequence[str] | None = ...,
    collect: _OneValue = ...,
    pad: bool = ...,
    results_at: Mapping[str, int] | None = ...,
) -> GivesOne: ...


@overload
def sharded(
    axis: str,
    /,
    *,
    split: str | Sequence[str] | None = ...,
    collect: Literal["mean"],
    pad: bool = ...,
    results_at: Mapping[str, int] | None = ...,
) -> GivesMean: ...


@overload
def sharded(
    axis: str,
    /,
    *,
    split: str | Sequence[str] | None = ...,
    collect: Literal["list"],
    pad: bool = ...,
    results_at: Mapping[str, int] | None = ...,
) -> GivesList: ...


@overload
def sharded(
    axis: str,
    /,
    *,
    split: str | Sequence[str] | None = ...,
    collect: Callable[[list[R]], J],
    pad: bool = ...,
    results_at: Mapping[str, int] | None = ...,
) -> GivesMade[R, J]: ...


def sharded(
    axis: str,
    /,
    *,
    split: str | Sequence[str] | None = None,
    collect: Any = "concat",
    pad: bool = False,
    results_at: Mapping[str, int] | None = None,
) -> Any:
    """Declare that a method's arguments are split by rows over an axis, and its results are joined.

    `group.call(Policy.train, batch)` then gives each coordinate of the axis its rows, the same ones to all
    ranks that have it, and takes the results of one rank per coordinate.

    Args:
        axis: A named axis of the group.
        split: Names of the parameters that are split: batches (`RowBatch`), what was split before
            (`Shardable`), arrays, tensors, lists, or tuples and dicts of these. None of them is None, or it
            is None for all. All other arguments go to all as they are. May be left out where the method has
            one parameter only.
        collect: What becomes of the results, in the order of the axis: "concat": joined row after row (tuples
            and dicts place by place); "list": the list of them; "first"; "sum" or "mean" (place by place,
            of equal types and shapes; each result counts alike; of integers the mean is a float); or a
            function of the list of them.
        pad: Add the first rows again until rows divide by the size of the axis. Each result must then have a
            row for each that its rank was given (or be None), and those of added rows are dropped.
        results_at: Coordinates on other axes where results are taken, such as `{"pp": -1}`; 0 on those that
            are not named.

    Raises:
        TypeError: The method is no function, is a generator, or is declared already.
        ValueError: `collect` is unknown, or a sum or mean of padded rows; or `results_at` names the axis.
    """
    if not isinstance(axis, str):
        raise TypeError(f'@sharded takes the name of an axis, as in @sharded("dp"), not {axis!r}')
    if axis in (at := dict(results_at or {})):
        raise ValueError(f"results are taken at all coordinates of {axis!r}: leave it out of results_at")
    if pad and collect in ("sum", "mean"):
        raise ValueError(f"pad=True with collect={collect!r} would count added rows: drop one of them")
    return partial(
        declare,
        declaration=Declaration(
            "sharded", _collector(collect), axis, _names(split), pad, tuple(sorted(at.items()))
        ),
    )


@overload
def replicated(method: _Async[P, R], /) -> DeclaredMethod[P, _Local[R], R, R]: ...


@overload
def replicated(method: _Sync[P, R], /) -> DeclaredMethod[P, R, R, R]: ...


@overload
def replicated(*, collect: _OneValue = ...) -> GivesOne: ...


@overload
def replicated(*, collect: Literal["mean"]) -> GivesMean: ...


@overload
def replicated(*, collect: Literal["list"]) -> GivesList: ...


@overload
def replicated(*, collect: Callable[[list[R]], J]) -> GivesMade[R, J]: ...


def replicated(method: Any = None, /, *, collect: Any = "first") -> Any:
    """Declare that all ranks get the same arguments, and one result stands for all.

    `@replicated`, or `@replicated(collect=…)`: see `sharded`; by default rank 0's result is the value.

    Raises:
        TypeError: See `sharded`.
        ValueError: See `sharded`.
    """
    return _declared(method, Declaration("replicated", _collector(collect)))


@overload
def rank_zero(method: _Async[P, R], /) -> DeclaredMethod[P, _Local[R], R, R]: ...


@overload
def rank_zero(method: _Sync[P, R], /) -> DeclaredMethod[P, R, R, R]: ...


def rank_zero(method: Any, /) -> Any:
    """Declare that a method is called on rank 0 only; its result is the value.

    Raises:
        TypeError: See `sharded`.
    """
    return declare(method, Declaration("rank_zero", "first"))


@overload
def per_rank(method: _Async[P, R], /) -> DeclaredMethod[..., _Local[R], R, list[R]]: ...


@overload
def per_rank(method: _Sync[P, R], /) -> DeclaredMethod[..., R, R, list[R]]: ...


@overload
def per_rank(*, split: str | Sequence[str]) -> GivesListOfItems: ...


def per_rank(method: Any = None, /, *, split: str | Sequence[str] | None = None) -> Any:
    """Declare that each rank gets an item of its own of each argument that is split; gives all results.

    `@per_rank`, or `@per_rank(split=…)`: see `sharded`. Whoever calls gives a list with an item for each
    rank, or what can be split into them (`Shardable`). The value is the list of results, in rank order.

    Raises:
        TypeError: See `sharded`.
    """
    return _declared(method, Declaration("per_rank", "list", split=_names(split)))


def _declared(method: Any, declaration: Declaration) -> Any:
    return partial(declare, declaration=declaration) if method is None else declare(method, declaration)


def _names(split: str | Iterable[str] | None) -> tuple[str, ...] | None:
    return None if split is None else (split,) if isinstance(split, str) else tuple(split)


def _collector(collect: Any) -> Mode | Function:
    if callable(collect):
        return Function(collect, getattr(collect, "__qualname__", repr(collect)))
    if collect not in MODES:
        raise ValueError(f"results are collected by {', '.join(MODES)}, or a function, not {collect!r}")
    return collect  # type: ignore[no-any-return]
