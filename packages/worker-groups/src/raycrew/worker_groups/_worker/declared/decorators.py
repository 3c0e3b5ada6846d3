"""The decorators: how a group calls a method, and what becomes of its results."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar, overload

from raycrew.worker_groups._worker.declared.declaration import MODES, Declaration, Function, Mode, declare
from raycrew.worker_groups._worker.declared.method_types import (
    AsyncMethod,
    DeclaredMethod,
    GivesList,
    GivesListOfItems,
    GivesMade,
    GivesMean,
    GivesOne,
    Local,
    SyncMethod,
)

P = ParamSpec("P")
R = TypeVar("R")
J = TypeVar("J")

_OneValue = Literal["concat", "first", "sum"]


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

    Examples:
        >>> class Policy:
        ...     @sharded("dp")
        ...     def double(self, rows: list[int]) -> list[int]:
        ...         return [2 * row for row in rows]
        >>> axes = NamedSharding([0, 1], ["dp"])
        >>> with RayWorkerGroup(cluster, Policy, sharding_annotations=axes) as group:
        ...     group.call(Policy.double, [1, 2, 3, 4]).get_results()
        [2, 4, 6, 8]
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
def replicated(method: AsyncMethod[P, R], /) -> DeclaredMethod[P, Local[R], R, R]: ...


@overload
def replicated(method: SyncMethod[P, R], /) -> DeclaredMethod[P, R, R, R]: ...


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
def rank_zero(method: AsyncMethod[P, R], /) -> DeclaredMethod[P, Local[R], R, R]: ...


@overload
def rank_zero(method: SyncMethod[P, R], /) -> DeclaredMethod[P, R, R, R]: ...


def rank_zero(method: Any, /) -> Any:
    """Declare that a method is called on rank 0 only; its result is the value.

    Raises:
        TypeError: See `sharded`.
    """
    return declare(method, Declaration("rank_zero", "first"))


@overload
def per_rank(method: AsyncMethod[P, R], /) -> DeclaredMethod[..., Local[R], R, list[R]]: ...


@overload
def per_rank(method: SyncMethod[P, R], /) -> DeclaredMethod[..., R, R, list[R]]: ...


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
