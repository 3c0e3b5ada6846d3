"""Who gets the next call. Pure: a strategy sees loads and a key, and names a rank."""

import bisect
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

POINTS_PER_RANK = 128
CALL_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What is known of one worker when a call is to be placed.

    Attributes:
        rank: The worker.
        outstanding: Calls sent to it and not returned.
        usage: Its last reported CPU use: 0 (idle), 1 for one busy core. None without a report: there are some
            only for `least_loaded`, and for a function with an attribute `needs_usage` that is true.
        sent_since_report: Calls sent to it since that report; all of them without reports.
    """

    rank: int
    outstanding: int = 0
    usage: float | None = None
    sent_since_report: int = 0


class Strategy(Protocol):
    """Chooses a worker.

    Attributes:
        sticky: Whether a call waits for its worker when that one is full, rather than go to another.
        needs_key: Whether calls need a key.
        needs_usage: Whether loads need reports of resource use.
    """

    sticky: bool
    needs_key: bool
    needs_usage: bool

    def choose(self, loads: Sequence[WorkerLoad], key: Any) -> int:
        """Rank of one of `loads`, which are in rank order and never empty."""
        ...


class RoundRobin:
    """Each worker in turn."""

    sticky = needs_key = needs_usage = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, loads: Sequence[WorkerLoad], key: Any) -> int:  # noqa: ARG002
        """The next rank after the last one."""
        self._last = next((load.rank for load in loads if load.rank > self._last), loads[0].rank)
        return self._last


class LeastOutstanding:
    """The worker with the fewest calls that have not returned; in turn among equals."""

    sticky = needs_key = needs_usage = False

    def __init__(self) -> None:
        self._turn = RoundRobin()

    def choose(self, loads: Sequence[WorkerLoad], key: Any) -> int:
        """A rank with the fewest outstanding calls."""
        fewest = min(load.outstanding for load in loads)
        return self._turn.choose([load for load in loads if load.outstanding == fewest], key)


class LeastLoaded:
    """The worker that reports the lowest resource use.

    A report is a little old, so each call sent since counts as a tenth of a worker; without that, all calls
    between two reports would go to one worker.
    """

    sticky = needs_key = False
    needs_usage = True

    def __init__(self) -> None:
        self._turn = LeastOutstanding()

    def choose(self, loads: Sequence[WorkerLoad], key: Any) -> int:
        """A rank with the lowest use; one that has not reported counts as idle."""
        used = {load.rank: (load.usage or 0.0) + CALL_WEIGHT * load.sent_since_report for load in loads}
        lowest = min(used.values())
        return self._turn.choose([load for load in loads if used[load.rank] <= lowest + 1e-9], key)


class ConsistentHash:
    """The same key to the same worker, as prefix caches like it.

    Workers stand on a ring at many points each (Karger et al., 1997): when one is lost, only its keys move.
    """

    sticky = needs_key = True
    needs_usage = False

    def __init__(self) -> None:
        # Both at once, for callers in other threads.
        self._ring: tuple[frozenset[int], list[tuple[int, int]]] = (frozenset(), [])

    def choose(self, loads: Sequence[WorkerLoad], key: Any) -> int:
        """The rank whose point follows the key's."""
        ranks = frozenset(load.rank for load in loads)
        known, points = self._ring
        if ranks != known:
            points = sorted(
                (_point(f"{rank}/{i}".encode()), rank) for rank in ranks for i in range(POINTS_PER_RANK)
            )
            self._ring = (ranks, points)
        at = bisect.bisect(points, (_point(key_bytes(key)), -1))
        return points[at % len(points)][1]


class Custom:
    """A function of the caller's own: of loads and key, to a rank."""

    sticky = needs_key = False

    def __init__(self, function: Callable[[Sequence[WorkerLoad], Any], int]) -> None:
        self.needs_usage = bool(getattr(function, "needs_usage", False))
        self._function = function

    def choose(self, loads: Sequence[WorkerLoad], key: Any) -> int:
        """What the function says.

        Raises:
            ValueError: It named a rank that it was not offered.
        """
        rank = self._function(loads, key)
        if not any(load.rank == rank for load in loads):
            offered = [load.rank for load in loads]
            raise ValueError(f"the load balancing strategy chose rank {rank!r}, it was offered {offered}")
        return rank


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "round_robin": RoundRobin,
    "least_outstanding": LeastOutstanding,
    "least_loaded": LeastLoaded,
    "consistent_hash": ConsistentHash,
}


def strategy_of(which: str | Callable[[Sequence[WorkerLoad], Any], int]) -> Strategy:
    """A fresh strategy by name, or around a function.

    Raises:
        ValueError: No strategy has that name.
        TypeError: It is neither a name nor callable.
    """
    if isinstance(which, str):
        if which not in STRATEGIES:
            raise ValueError(
                f"no load balancing strategy is called {which!r}; there are {', '.join(STRATEGIES)}"
            )
        return STRATEGIES[which]()
    if not callable(which):
        raise TypeError(f"a load balancing strategy is a name or a function, not {which!r}")
    return Custom(which)


def key_bytes(key: Any) -> bytes:
    """A key as bytes, the same in every process.

    Raises:
        TypeError: It is not a string, bytes, an integer or a tuple of these.
    """
    if isinstance(key, bytes):
        return b"b" + key
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, int):
        return b"i%d" % key
    if isinstance(key, tuple):
        parts = [key_bytes(part) for part in key]
        return b"t" + b"".join(b"%d:" % len(part) + part for part in parts)
    raise TypeError(f"a key is a string, bytes, an integer or a tuple of these, not {type(key).__name__}")


def _point(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
