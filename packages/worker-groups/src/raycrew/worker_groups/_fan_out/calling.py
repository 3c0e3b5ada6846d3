"""Stateless work spread over the cluster: verification, scoring, code execution.

Items run in processes of a warm pool that is shared by all callers of a driver: one host per node, one
process per free CPU. What an item started ends with it, in whatever session it is. A process is killed when
an item runs past its time; whatever else was in its batch is sent again.
"""

import inspect
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sized
from numbers import Integral
from typing import Any, Literal, TypeVar, overload

from rich.progress import Progress

from raycrew.worker_groups._calls import Results, refuse_as_items
from raycrew.worker_groups._fan_out.ahead import have_ready
from raycrew.worker_groups._fan_out.batches import BatchSizer
from raycrew.worker_groups._fan_out.outcomes import (
    FanOutError,
    FunctionLoadError,
    ItemCrashedError,
    ItemError,
    ItemOutcome,
    ItemTimeoutError,
)
from raycrew.worker_groups._fan_out.processes import Function
from raycrew.worker_groups._fan_out.progress import advancing
from raycrew.worker_groups._fan_out.run import Limits, Run
from raycrew.worker_groups._fan_out.warm_pool import close_shared_pool, shared_pool

__all__ = [
    "FanOutError",
    "FunctionLoadError",
    "ItemCrashedError",
    "ItemError",
    "ItemOutcome",
    "ItemTimeoutError",
    "close_fan_out",
    "fan_out",
    "fan_out_as_completed",
]

T = TypeVar("T")
R = TypeVar("R")


@overload
def fan_out(
    fn: Callable[[T], R],
    items: Iterable[T],
    *,
    batch_size: int | Literal["auto"] = ...,
    max_in_flight: int | None = ...,
    max_workers: int | None = ...,
    timeout_s: float | None = ...,
    retries: int = ...,
    initializer: Callable[[], object] | None = ...,
    on_error: Literal["raise"] = ...,
    warm: bool = ...,
    progress: bool | Progress = ...,
) -> list[R]: ...


@overload
def fan_out(
    fn: Callable[[T], R],
    items: Iterable[T],
    *,
    batch_size: int | Literal["auto"] = ...,
    max_in_flight: int | None = ...,
    max_workers: int | None = ...,
    timeout_s: float | None = ...,
    retries: int = ...,
    initializer: Callable[[], object] | None = ...,
    on_error: Literal["return"],
    warm: bool = ...,
    progress: bool | Progress = ...,
) -> list[R | ItemError]: ...


def fan_out(
    fn: Callable[[T], R],
    items: Iterable[T],
    *,
    batch_size: int | Literal["auto"] = "auto",
    max_in_flight: int | None = None,
    max_workers: int | None = None,
    timeout_s: float | None = None,
    retries: int = 0,
    initializer: Callable[[], object] | None = None,
    on_error: Literal["raise", "return"] = "raise",
    warm: bool = False,
    progress: bool | Progress = True,
) -> list[Any]:
    """Run a function on every item, spread over the cluster; the results come in the order of the items.

    The first call starts the pool; it stays warm for the next ones until `close_fan_out` or the end of the
    driver. `fan_out(fn, [], warm=True)` asks for it ahead, and returns at once.

    The function may be a lambda or a closure; it runs in a process that is not a Ray worker, so it can't call
    Ray. It finds in its environment, as workers of groups do, what `init_ray(secrets=…)` was given in this
    process, and every variable of this one that the connection's policy allows and that holds credentials.

    An item begins where the one before it began: its working directory and those variables are put back, and
    every process that it started is ended, daemons too. What is to last for many items belongs into
    `initializer`.

    Args:
        fn: Called with one item. It may run again for an item whose node, or its host there, was lost.
        items: Read as late as possible.
        batch_size: Items sent together; `auto` measures them, for batches of some tens of milliseconds.
        max_in_flight: Most items that are sent and not returned; None for two batches per process.
        max_workers: Most processes; None for one per free CPU. Calls that run at the same time share the
            processes of the first.
        timeout_s: Time that one item may take. Past it, its process and all that it started are killed.
            Loading the function and running the initializer are not charged to it. With it, a node's host
            that has not answered for a minute, as one that is stopped, is killed with all its processes, and
            its items run again; without it, it is waited for, and a warning says so.
        retries: How often an item is tried again after it raised, ran past its time or ended its process.
        initializer: Called without arguments in each process, before the first item and not again in later
            calls that name it, whatever their function (a process remembers the last eight). What it sets as
            globals of its module, or in variables that it shares with `fn`, `fn` finds: a model is loaded
            once, rather than sent in a closure. Processes that it starts live on. With `timeout_s` it may
            take half an hour, or `timeout_s` if that is more.
        warm: Without items: have processes start on all nodes, as many as would work now, load `fn` and run
            `initializer` there, and wait for none of it. Later calls find them, or wait for the rest; what
            fails there fails again in these. No CPU is claimed meanwhile. It is given up with a later call of
            the same function or initializer that fails, is interrupted, cancelled or closed before its last
            outcome, as well as by `close_fan_out`.
        on_error: `raise` a `FanOutError` after all items have run, or `return` an `ItemError` in each failed
            item's place.
        progress: A bar on the terminal for calls longer than a second; or a rich display to add one to.

    Returns:
        What `fn` returned, in the order of the items.

    Raises:
        FanOutError: Some items failed. It is an ExceptionGroup of `ItemError`, and holds the other results.
        FunctionLoadError: A process could not load the function, for instance because an import fails there,
            or its initializer failed. No further item runs.
        TypeError: `fn` or `initializer` can't be pickled, or an argument is of the wrong type.
        ValueError: An argument is out of its range, or a secret can't be a variable.

    Examples:
        >>> fan_out(math.sqrt, [1.0, 4.0, 9.0])
        [1.0, 2.0, 3.0]
        >>> one, two = fan_out(math.sqrt, [-1.0, 4.0], on_error="return")
        >>> type(one).__name__, two
        ('ItemError', 2.0)
    """
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error must be 'raise' or 'return', not {on_error!r}")
    if warm:
        _check_no_items(items)
    outcomes = fan_out_as_completed(
        fn,
        items,
        batch_size=batch_size,
        max_in_flight=max_in_flight,
        max_workers=max_workers,
        timeout_s=timeout_s,
        retries=retries,
        initializer=initializer,
        progress=progress,
    )
    if warm:
        have_ready(_pickled(fn, initializer), max_workers, timeout_s)
        return []
    ended = sorted(outcomes, key=lambda outcome: outcome.index)
    failures = [outcome.error for outcome in ended if outcome.error is not None]
    if failures and on_error == "raise":
        raise FanOutError(failures, {outcome.index: outcome.value for outcome in ended if outcome.ok})
    results: list[Any] = [outcome.value if outcome.ok else outcome.error for outcome in ended]
    return results


def fan_out_as_completed(
    fn: Callable[[T], R],
    items: Iterable[T],
    *,
    batch_size: int | Literal["auto"] = "auto",
    max_in_flight: int | None = None,
    max_workers: int | None = None,
    timeout_s: float | None = None,
    retries: int = 0,
    initializer: Callable[[], object] | None = None,
    progress: bool | Progress = True,
) -> Results[ItemOutcome[R]]:
    """As `fan_out`, but gives each item's outcome as it comes, failed ones too; for `for` and `async for`.

    Closing the iterator (or leaving it to the garbage collector) gives up what is left and kills what runs.
    New items are sent only while the caller takes outcomes, so the source may be endless.

    Args:
        fn: See `fan_out`.
        items: See `fan_out`.
        batch_size: See `fan_out`.
        max_in_flight: See `fan_out`.
        max_workers: See `fan_out`.
        timeout_s: See `fan_out`.
        retries: See `fan_out`.
        initializer: See `fan_out`.
        progress: See `fan_out`.

    Returns:
        The outcomes, with the index of their item.

    Raises:
        FunctionLoadError: See `fan_out`; raised while iterating.
        TypeError: See `fan_out`; raised at once.
        ValueError: See `fan_out`; raised at once.

    Examples:
        >>> for outcome in fan_out_as_completed(math.sqrt, [16.0]):
        ...     print(outcome.index, outcome.ok, outcome.value)
        0 True 4.0
    """
    _check_function("fn", fn)
    if initializer is not None:
        _check_function("initializer", initializer)
    _check_items(items)
    if batch_size != "auto":
        _check_count("batch_size", batch_size, least=1)
    _check_count("max_in_flight", max_in_flight, least=1, optional=True)
    _check_count("max_workers", max_workers, least=1, optional=True)
    _check_count("retries", retries, least=0)
    _check_timeout(timeout_s)
    fixed = None if batch_size == "auto" else int(batch_size)
    function, limits = _pickled(fn, initializer), Limits(max_in_flight, timeout_s, retries)
    return Results(_outcomes(function, items, fixed, max_workers, limits, progress))


def close_fan_out() -> None:
    """End the pool, all its processes and what they started; the next call of `fan_out` starts another."""
    close_shared_pool()


def _outcomes(
    function: Function,
    items: Iterable[Any],
    batch_size: int | None,
    max_workers: int | None,
    limits: Limits,
    progress: bool | Progress,
) -> Generator[ItemOutcome[Any], None, None]:
    length = len(items) if isinstance(items, Sized) else None
    if length == 0:
        return
    pool = shared_pool()
    sizer = BatchSizer(batch_size, pool.item_seconds.get(function.name))
    with (
        pool.with_ahead(function.keys),
        advancing(progress, function.name.rpartition(".")[2], length) as advance,
        pool.session(max_workers) as slots,
    ):
        run = Run(pool, slots, function, iter(items), length, sizer, limits)
        for outcome in run.outcomes():
            advance(outcome.ok)
            yield outcome
        if sizer.estimate_s is not None:
            pool.item_seconds[function.name] = sizer.estimate_s


def _check_no_items(items: object) -> None:
    if not isinstance(items, Sized) or len(items):
        raise ValueError("warm=True asks for the pool ahead and runs no items: give it an empty list of them")


def _pickled(fn: Callable[[Any], Any], initializer: Callable[[], object] | None) -> Function:
    try:
        return Function(fn, initializer)
    except Exception as error:
        what = f"{fn!r}" if initializer is None else f"{fn!r} or {initializer!r}"
        raise TypeError(
            f"{what} can't be sent to other processes, because it can't be pickled: {error}"
        ) from error


def _check_function(name: str, fn: object) -> None:
    if not callable(fn):
        raise TypeError(f"{name} must be callable, not {type(fn).__name__}")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(f"{name} must be a plain function that returns: neither async nor a generator")


def _check_items(items: object) -> None:
    refuse_as_items(items, "items")
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise TypeError(f"items must be an iterable of items, not {type(items).__name__}")


def _check_count(name: str, value: object, *, least: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int | Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def _check_timeout(timeout_s: object) -> None:
    if timeout_s is None:
        return
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool):
        raise TypeError(f"timeout_s must be a number of seconds, not {timeout_s!r}")
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"timeout_s must be positive and finite, not {timeout_s}")
