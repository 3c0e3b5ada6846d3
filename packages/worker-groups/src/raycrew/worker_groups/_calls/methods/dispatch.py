"""Which rank gets which arguments; pure, and all checks are done before anything is sent."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from raycrew.worker_groups._calls.methods.items import disjoint, exact_length, nested, split
from raycrew.worker_groups._calls.methods.shape import Dispatch, GroupShape, Send
from raycrew.worker_groups._worker import MethodInfo

OnlyOn = Literal["all", "tied_leader", "all_tied_workers"]

_MAX_KNOWN_CALLS = 1000
_ONLY_ON = ("all", "tied_leader", "all_tied_workers")


def dispatch_single(
    shape: GroupShape,
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    ranks: Sequence[int] | None = None,
    only_on: OnlyOn = "all",
    run_rank_0_only_axes: Sequence[str] = (),
) -> Dispatch:
    """The same arguments for every rank that is called.

    Raises:
        UnknownMethodError: The class has no such method.
        TypeError: The arguments don't fit its signature.
        ValueError: Ranks, axes or `only_on` are not the group's.
    """
    method = shape.method(name)
    _check_signature(shape, method, args, kwargs)
    if ranks is not None:
        called = returning = shape.check_ranks(ranks)
    else:
        targets = _targets(shape, only_on, run_rank_0_only_axes)
        called, returning = map(shape.without_absent, targets)
    sends = tuple(Send(rank, args, kwargs) for rank in called)
    return Dispatch(method, sends, returning, only_on != "all", world_size=shape.world_size)


def dispatch_multiple(
    shape: GroupShape,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    common_kwargs: Mapping[str, Any] | None = None,
    only_on: OnlyOn = "all",
    run_rank_0_only_axes: Sequence[str] = (),
    allow_partial: bool = False,
) -> Dispatch:
    """One item of each argument for each rank that is called, or for each tied group.

    Raises:
        UnknownMethodError: The class has no such method.
        TypeError: An argument can't be split, or the arguments don't fit the signature.
        ValueError: An argument has another number of items than there are ranks (or tied groups) to call.
    """
    method = shape.method(name)
    common = disjoint(kwargs, common_kwargs)
    called, returning = _targets(shape, only_on, run_rank_0_only_axes)
    group_of = {rank: i for i, group in enumerate(shape.tied_groups) for rank in group}
    per_group = only_on != "all"
    shares = sorted({group_of[r] for r in called}) if per_group else list(called)
    place = {share: i for i, share in enumerate(shares)}
    what = "tied groups" if per_group else "ranks"
    columns = [split(arg, len(shares), what, f"argument {i}") for i, arg in enumerate(args)]
    named = {key: split(arg, len(shares), what, f"argument {key!r}") for key, arg in kwargs.items()}
    if not columns and not named:
        raise ValueError("no argument has items to distribute; run_all_workers_single_data calls all alike")
    n_items = exact_length([*columns, *named.values()], len(shares), what, allow_partial)
    sends = []
    for rank in called:
        item = place[group_of[rank] if per_group else rank]
        if item < n_items:
            own = {key: column[item] for key, column in named.items()}
            sends.append(Send(rank, tuple(column[item] for column in columns), {**own, **common}))
    for send in sends:
        _check_signature(shape, method, send.args, send.kwargs)
    reached = {send.rank for send in sends}
    returned = tuple(rank for rank in returning if rank in reached)
    return Dispatch(method, tuple(sends), returned, per_group, world_size=shape.world_size)


def dispatch_sharded(
    shape: GroupShape,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    in_sharded_axes: Sequence[str] = (),
    replicate_on_axes: Sequence[str] = (),
    output_is_replicated: Sequence[str] = (),
    make_dummy_calls_to_free_axes: bool = False,
    common_kwargs: Mapping[str, Any] | None = None,
    allow_partial: bool = False,
) -> Dispatch:
    """Arguments split over named axes, repeated over others.

    An argument holds one item per coordinate of the first axis of `in_sharded_axes`, each of which holds
    one per coordinate of the second, and so on. Axes that are named nowhere are free: only coordinate 0 is
    called, the others not at all or, with `make_dummy_calls_to_free_axes`, with None for every argument.

    Raises:
        UnknownMethodError: The class has no such method.
        TypeError: An argument can't be split, or the arguments don't fit the signature.
        ValueError: An axis is unknown or named twice, or an argument's length is not its axis's size.
    """
    method = shape.method(name)
    common = disjoint(kwargs, common_kwargs)
    sharded = shape.axes(in_sharded_axes, "in_sharded_axes")
    replicated = shape.axes(replicate_on_axes, "replicate_on_axes")
    collapsed = shape.axes(output_is_replicated, "output_is_replicated")
    sharding = shape.sharding
    if sharding is None:
        raise ValueError("run_all_workers_sharded_data needs a group with sharding_annotations")
    if both := set(sharded) & set(replicated):
        raise ValueError(f"axes {sorted(both)} are both sharded and replicated")
    sizes = [sharding.get_axis_size(axis) for axis in sharded]
    columns = [nested(a, sharded, sizes, f"argument {i}", allow_partial) for i, a in enumerate(args)]
    named = {k: nested(a, sharded, sizes, f"argument {k!r}", allow_partial) for k, a in kwargs.items()}
    if len({frozenset(column) for column in (*columns, *named.values())}) > 1:
        raise ValueError("arguments have items at different coordinates; each needs the same ones")
    free = [axis for axis in sharding.names if axis not in sharded and axis not in replicated]
    sends, returning = [], []
    for rank in range(shape.world_size):
        coords = sharding.get_worker_coords(rank)
        at = tuple(coords[axis] for axis in sharded)
        if any(coords[axis] for axis in free):
            if make_dummy_calls_to_free_axes:
                sends.append(Send(rank, (None,) * len(args), {**dict.fromkeys(kwargs), **common}))
            continue
        if not all(at in column for column in (*columns, *named.values())):
            continue
        own = {key: column[at] for key, column in named.items()}
        sends.append(Send(rank, tuple(column[at] for column in columns), {**own, **common}))
        if not any(coords[axis] for axis in collapsed):
            returning.append(rank)
    for send in sends[:1] if not allow_partial else sends:
        _check_signature(shape, method, send.args, send.kwargs)
    return Dispatch(method, tuple(sends), tuple(returning), world_size=shape.world_size)


def bind_arguments(
    shape: GroupShape, method: MethodInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """The arguments of a call by the method's parameters.

    Raises:
        TypeError: They don't fit.
    """
    try:
        return method.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{shape.info.name}.{method.name}{method.signature}: {error}") from None


def _targets(
    shape: GroupShape, only_on: OnlyOn, run_rank_0_only_axes: Sequence[str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks to call, and ranks to return from."""
    if only_on not in _ONLY_ON:
        raise ValueError(f"only_on is one of {', '.join(_ONLY_ON)}, not {only_on!r}")
    axes = shape.axes(run_rank_0_only_axes or (), "run_rank_0_only_axes")
    ranks = range(shape.world_size)
    if axes and shape.sharding is not None:
        coords = shape.sharding.get_worker_coords
        called = tuple(r for r in ranks if not any(coords(r)[axis] for axis in axes))
    else:
        called = tuple(ranks)
    if only_on == "all":
        return called, called
    leaders = {group[0] for group in shape.tied_groups}
    leading = tuple(rank for rank in called if rank in leaders)
    return (leading if only_on == "tied_leader" else called), leading


def _check_signature(
    shape: GroupShape, method: MethodInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    call = (method.name, len(args), tuple(kwargs))
    if call in shape.known_calls:
        return
    bind_arguments(shape, method, args, kwargs)
    if len(shape.known_calls) < _MAX_KNOWN_CALLS:
        shape.known_calls.add(call)
