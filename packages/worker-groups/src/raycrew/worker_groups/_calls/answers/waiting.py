"""Waiting for several ranks at once: one deadline, and an early end on the first failure."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from raycrew.cluster_core import Session
from raycrew.worker_groups._health import LONGEST_S
from raycrew.worker_groups._ray import while_connected

#: After the first failure others get this long to fail too, so that the error shows the whole picture.
GRACE_S = 2.0

_POLL_S = 1.0


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


def by_rank(settled: Settled, ranks: Sequence[int]) -> Settled:
    """The errors and what is pending of some calls by rank; `ranks` has that of each position."""
    errors = {ranks[position]: error for position, error in settled.errors.items()}
    return Settled(errors=errors, pending=sorted(ranks[position] for position in settled.pending))


def deadline_after(timeout_s: float | None) -> float | None:
    """The point of the monotonic clock that is `timeout_s` away, and no further than any wait can take.

    Raises:
        TypeError: It is no number.
        ValueError: It is not a number, as `math.nan` says of itself.
    """
    if timeout_s is None:
        return None
    kinds: Any = (int, float, Real)
    if not isinstance(timeout_s, kinds):
        raise TypeError(f"a timeout is a number of seconds, not {timeout_s!r}")
    if math.isnan(timeout_s):
        raise ValueError(f"a timeout is a number of seconds, which {timeout_s!r} is not")
    return time.monotonic() + min(float(timeout_s), LONGEST_S)


def left(deadline: float | None, at_most: float | None = None) -> float | None:
    """Seconds until a deadline, not below zero; None without one."""
    bounds = [at_most] if at_most is not None else []
    if deadline is not None:
        bounds.append(max(0.0, deadline - time.monotonic()))
    return min(bounds) if bounds else None


def await_some(
    refs: Sequence[Any],
    deadline: float | None,
    go_on: Callable[[], object],
    *,
    count: int = 1,
    fetch_local: bool = True,
) -> list[Any]:
    """Wait until as many of some calls are done, or the deadline is over; gives those that are done.

    Args:
        refs: The calls.
        deadline: Of the monotonic clock, or None.
        go_on: Called now and then; waiting ends with what it raises.
        count: How many are waited for.
        fetch_local: Whether their results are to be on this node then; else they stay where they are.
    """
    with while_connected(go_on) as session:
        while True:
            go_on()
            within_s = left(deadline, _POLL_S)
            ready, _ = session.wait(refs, num_returns=count, timeout=within_s, fetch_local=fetch_local)
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
    with while_connected(go_on) as session:
        while waiting:
            go_on()
            ready, waiting = session.wait(waiting, timeout=left(deadline, _POLL_S))
            if waiting and ready:
                more, waiting = session.wait(waiting, num_returns=len(waiting), timeout=0)
                ready += more
            for ref in ready:
                position = position_of[ref]
                settled.elapsed_s[position] = time.monotonic() - start
                _take(session, ref, position, settled)
                on_done(position)
            if settled.errors and not failing:
                go_on()  # else what failed may be the connection
                failing, grace = True, time.monotonic() + grace_s
                deadline = grace if deadline is None else min(deadline, grace)
            if not ready and left(deadline) == 0.0:
                break
    settled.pending = sorted(position_of[ref] for ref in waiting)
    return settled


def _take(session: Session, ref: Any, position: int, settled: Settled) -> None:
    try:
        settled.values[position] = session.get(ref)
    except Exception as error:  # noqa: BLE001 - whatever the worker raised is reported, not handled
        settled.errors[position] = error
