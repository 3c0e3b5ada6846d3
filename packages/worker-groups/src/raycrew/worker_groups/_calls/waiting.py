"""Waiting for several ranks at once: one deadline, and an early end on the first failure."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray

#: After the first failure others get this long to fail too, so that the error shows the whole picture.
GRACE_S = 2.0

_POLL_S = 1.0
_ENDING_S = 5.0
_LOOK_S = 0.02


@dataclass(slots=True)
class Settled:
    """What became of some calls, by position.

    Attributes:
        values: Results.
        errors: Exceptions that Ray raised.
        pending: Positions that were not done when waiting ended.
        elapsed_s: Seconds until each position was done, from the start of the wait.
    """

    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)
    elapsed_s: dict[int, float] = field(default_factory=dict)


def deadline_after(timeout_s: float | None) -> float | None:
    """The point of the monotonic clock that is `timeout_s` away."""
    return None if timeout_s is None else time.monotonic() + timeout_s


def left(deadline: float | None, at_most: float | None = None) -> float | None:
    """Seconds until a deadline, not below zero; None without one."""
    bounds = [at_most] if at_most is not None else []
    if deadline is not None:
        bounds.append(max(0.0, deadline - time.monotonic()))
    return min(bounds) if bounds else None


@contextmanager
def while_connected(check: Callable[[], object]) -> Iterator[None]:
    """Where Ray ends what waits, by `SystemExit`, since its connection does: raise what `check` does."""
    try:
        yield
    except SystemExit:
        deadline = time.monotonic() + _ENDING_S
        while time.monotonic() < deadline:  # the connection is only about to end
            check()
            time.sleep(_LOOK_S)
        raise


def await_some(
    refs: Sequence[Any], deadline: float | None, go_on: Callable[[], object], *, count: int = 1
) -> list[Any]:
    """Wait until as many of some calls are done, or the deadline is over; gives those that are done.

    Args:
        refs: The calls.
        deadline: Of the monotonic clock, or None.
        go_on: Called now and then; waiting ends with what it raises.
        count: How many are waited for.
    """
    with while_connected(go_on):
        while True:
            go_on()
            ready, _ = ray.wait(list(refs), num_returns=count, timeout=left(deadline, _POLL_S))
            if len(ready) >= count or left(deadline) == 0.0:
                return ready


def settle(
    refs: Sequence[Any],
    deadline: float | None,
    go_on: Callable[[], object],
    *,
    grace_s: float = GRACE_S,
    on_done: Callable[[int], None] = lambda _position: None,
) -> Settled:
    """Wait until all calls are done, the deadline is over, or a first one failed and the grace is over.

    Args:
        refs: The calls.
        deadline: Of the monotonic clock, or None.
        go_on: Called now and then; waiting ends with what it raises.
        grace_s: What others get after the first failure.
        on_done: Called with the position of each call that is done.
    """
    settled = Settled()
    position_of = {ref: position for position, ref in enumerate(refs)}
    start, waiting, failing = time.monotonic(), list(refs), False
    with while_connected(go_on):
        while waiting:
            go_on()
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=left(deadline, _POLL_S))
            if waiting and ready:
                more, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
                ready += more
            for ref in ready:
                position = position_of[ref]
                settled.elapsed_s[position] = time.monotonic() - start
                _take(ref, position, settled)
                on_done(position)
            if settled.errors and not failing:
                failing, grace = True, time.monotonic() + grace_s
                deadline = grace if deadline is None else min(deadline, grace)
            if not ready and left(deadline) == 0.0:
                break
    settled.pending = sorted(position_of[ref] for ref in waiting)
    return settled


def _take(ref: Any, position: int, settled: Settled) -> None:
    try:
        settled.values[position] = ray.get(ref)
    except Exception as error:  # noqa: BLE001 - whatever the worker raised is reported, not handled
        settled.errors[position] = error
