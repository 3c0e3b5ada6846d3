"""Who gets what of a call on a method that says so itself; pure, as `dispatch` is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raycrew.worker_groups._calls.answers import MultiWorkerFuture
from raycrew.worker_groups._calls.methods.dispatch import bind_arguments
from raycrew.worker_groups._calls.methods.items import split_per_rank
from raycrew.worker_groups._calls.methods.shape import Dispatch, GroupShape, Send
from raycrew.worker_groups._worker import (
    Declaration,
    Join,
    MethodInfo,
    declaration_of,
    fqn_of_function,
    split_rows,
)
from raycrew.worker_groups.sharding import NamedSharding

_Call = tuple[tuple[Any, ...], Mapping[str, Any]]


def dispatch_declared(
    shape: GroupShape, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Dispatch:
    """The call of a method that has a declaration.

    Raises:
        UnknownMethodError: The class has no such method.
        TypeError: The arguments don't fit its signature, or one can't be split.
        ValueError: An axis is unknown, rows don't divide, or numbers of rows or items are wrong.
    """
    method = shape.method(name)
    declared = method.declared
    if declared is None:
        raise ValueError(f"{shape.info.name}.{name} does not say how it is called")
    if isinstance(declared.collect, str) or declared.collect.fn is not None:
        return _DISPATCHES[declared.kind](shape, method, declared, args, kwargs)
    raise TypeError(
        f"{declared.collect.name}, which joins the results of {shape.info.name}.{name}, can't be imported "
        f"here ({declared.collect.why_not}); it has to be in a module that the caller's environment has"
    )


def check_promise(shape: GroupShape, method: Any, name: str) -> None:
    """Check that a method of the worker class says what the function says that a caller has given for it.

    Raises:
        TypeError: It does not, so that the caller's types would be wrong.
    """
    known = shape.method(name)
    own, given = known.declared, declaration_of(method)
    if (own and own.promise) != (given and given.promise) and fqn_of_function(method) != known.origin:
        raise TypeError(
            f"{method.__qualname__} is {given or 'not declared'}, and {known.origin} is "
            f"{own or 'not declared'}: give the latter, or the name"
        )


def _sharded(
    shape: GroupShape, method: MethodInfo, declared: Declaration, args: tuple[Any, ...], kwargs: Any
) -> Dispatch:
    called = f"{shape.info.name}.{method.name}"
    sharding = _axes(shape, declared, called)
    n = sharding.get_axis_size(declared.axis)
    bound = bind_arguments(shape, method, args, kwargs)
    given = _given(bound.arguments, declared, called)
    parts: Sequence[Mapping[str, Any]] = [{}] * n
    rows: int | None = None
    kept: tuple[int, ...] = ()
    if given:
        may_pad = declared.collect not in ("sum", "mean")
        split = split_rows(given, n, pad=declared.pad, called=called, axis=declared.axis, may_pad=may_pad)
        parts = split.parts
        if declared.pad:
            rows, kept = split.rows, split.kept
    calls: list[_Call] = []
    for part in parts:
        bound.arguments.update(part)
        calls.append((bound.args, bound.kwargs))
    coords = [sharding.get_worker_coords(rank) for rank in range(shape.world_size)]
    sends = tuple(Send(rank, *calls[at[declared.axis]]) for rank, at in enumerate(coords))
    wanted = dict(declared.results_at)
    fixed = {axis: _coordinate(sharding, axis, wanted) for axis in sharding.names if axis != declared.axis}
    ranks = tuple(sharding.get_rank(**{declared.axis: i}, **fixed) for i in range(n))
    join = Join(called, ranks, declared.collect, rows, kept)
    return Dispatch(method, sends, ranks, join=join, world_size=shape.world_size)


def _per_rank(
    shape: GroupShape, method: MethodInfo, declared: Declaration, args: tuple[Any, ...], kwargs: Any
) -> Dispatch:
    called = f"{shape.info.name}.{method.name}"
    bound = bind_arguments(shape, method, args, kwargs)
    given = _given(bound.arguments, declared, called)
    columns = split_per_rank(given, shape.world_size)
    sends = []
    for rank in range(shape.world_size):
        bound.arguments.update({name: column[rank] for name, column in columns.items()})
        sends.append(Send(rank, bound.args, bound.kwargs))
    ranks = tuple(range(shape.world_size))
    join = Join(called, ranks, declared.collect)
    return Dispatch(method, tuple(sends), ranks, join=join, world_size=shape.world_size)


def _replicated(
    shape: GroupShape, method: MethodInfo, declared: Declaration, args: tuple[Any, ...], kwargs: Any
) -> Dispatch:
    bind_arguments(shape, method, args, kwargs)
    called = (0,) if declared.kind == "rank_zero" else shape.without_absent(range(shape.world_size))
    ranks = called[:1] if declared.collect == "first" else called
    join = Join(f"{shape.info.name}.{method.name}", ranks, declared.collect)
    sends = tuple(Send(rank, args, kwargs) for rank in called)
    return Dispatch(method, sends, ranks, join=join, world_size=shape.world_size)


_DISPATCHES: Mapping[str, Callable[..., Dispatch]] = {
    "sharded": _sharded,
    "per_rank": _per_rank,
    "replicated": _replicated,
    "rank_zero": _replicated,
}


def _axes(shape: GroupShape, declared: Declaration, called: str) -> NamedSharding:
    if shape.sharding is None:
        raise ValueError(
            f"{called} is {declared}, and the group has no named axes: give it sharding_annotations="
            f"NamedSharding(…), or call it by run_all_workers_…, which ignore the declaration"
        )
    for axis in (declared.axis, *dict(declared.results_at)):
        if axis not in shape.sharding.names:
            has = ", ".join(map(repr, shape.sharding.names))
            raise ValueError(f"{called} is {declared}, and the group has no axis {axis!r}; it has {has}")
    return shape.sharding


def _given(arguments: Mapping[str, Any], declared: Declaration, called: str) -> dict[str, Any]:
    names = declared.split or ()
    given = {name: arguments[name] for name in names if arguments.get(name) is not None}
    if names and not given:
        raise TypeError(f"{called} is {declared}, and there is nothing to split: {', '.join(names)} is None")
    for name, value in given.items():
        if isinstance(value, MultiWorkerFuture):
            raise TypeError(
                f"{name} of {called} is split here, and is a future: give what its get_results() gives"
            )
    return given


def _coordinate(sharding: NamedSharding, axis: str, wanted: Mapping[str, int]) -> int:
    size, at = sharding.get_axis_size(axis), wanted.get(axis, 0)
    if not -size <= at < size:
        raise ValueError(f"results_at={{{axis!r}: {at}}} is outside the {size} coordinates of that axis")
    return at % size
