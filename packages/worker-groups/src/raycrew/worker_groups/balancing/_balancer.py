"""Calls spread over the workers of a group, one worker each."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Protocol, TypeVar, overload

from raycrew.worker_groups._calls import MultiWorkerFuture, Results, deadline_after, left, method_name
from raycrew.worker_groups._declared import DeclaredMethod
from raycrew.worker_groups._observed import observed
from raycrew.worker_groups._ranks import RankInfo
from raycrew.worker_groups._ray import is_death
from raycrew.worker_groups.balancing._strategies import WorkerLoad, key_bytes, strategy_of
from raycrew.worker_groups.balancing._stream import Item, LostWorkerError, Stream
from raycrew.worker_groups.errors import WorkerFailureError, WorkerGroupError

R = TypeVar("R")
T = TypeVar("T")

REPORT_INTERVAL_S = 2.0


class BalancedGroup(Protocol):
    """A group as a balancer sees it."""

    @property
    def name(self) -> str:
        """Name of the group."""
        ...

    @property
    def ranks(self) -> Sequence[RankInfo]:
        """Where each rank is; a restarted worker has another generation."""
        ...

    @property
    def tied_workers_groups(self) -> Sequence[Sequence[int]]:
        """Ranks of each tied group, leader first."""
        ...

    def on(self, ranks: Sequence[int], *, timeout: float | None = None) -> Any:
        """Some ranks, with `call(method, *args, **kwargs)`."""
        ...


@dataclass(eq=False, slots=True)
class Sent:
    """A call that was sent to one worker."""

    rank: int
    generation: int
    future: MultiWorkerFuture[Any]
    deadline: float | None

    @property
    def end(self) -> Any:
        """What is ready when the call has ended."""
        return self.future._ends[0]  # noqa: SLF001 - made for this


class LoadBalancer:
    """Spreads calls and streams of items over a group, one worker (the leader of a tied group) for each.

    It may be used from several threads. Loads count the calls that went through this balancer.

    Args:
        group: The group.
        strategy: `round_robin`, `least_outstanding`, `least_loaded`, `consistent_hash`, or a function: it is
            called with a `WorkerLoad` for each worker that may be chosen, in rank order, and with the key of
            the call or item (None for a call without one), and returns the rank of one of them. With a true
            attribute `needs_usage` it gets loads with reports of resource use.
        idempotent_methods: Methods that may run twice: their items are sent again when a worker is lost.
        usage: Resource use by rank; asked at most every two seconds, and only for strategies that need it.

    Raises:
        ValueError: No strategy has that name, or one that needs reports was given no `usage`.
    """

    def __init__(
        self,
        group: BalancedGroup,
        strategy: str | Callable[[Sequence[WorkerLoad], Any], int] = "round_robin",
        *,
        idempotent_methods: Iterable[str] = (),
        usage: Callable[[], Mapping[int, float]] | None = None,
    ) -> None:
        if isinstance(idempotent_methods, str):
            raise TypeError(f"idempotent_methods is a sequence of names, as in [{idempotent_methods!r}]")
        self._group = group
        self._strategy = strategy_of(strategy)
        if self._strategy.needs_usage and usage is None:
            raise ValueError(f"the strategy {strategy!r} needs reports of resource use: usage=")
        self._idempotent = frozenset(idempotent_methods)
        self._usage = usage if self._strategy.needs_usage else None
        self._reported: Mapping[int, float] = {}
        self._reported_at = float("-inf")
        self._sent_since: Counter[int] = Counter()
        self._outstanding: Counter[int] = Counter()
        self._singles: list[Sent] = []
        self._lost: dict[int, int] = {}
        self._lock = threading.RLock()

    def loads(self) -> list[WorkerLoad]:
        """What is known of each living worker now, in rank order.

        Raises:
            WorkerGroupError: All workers are lost.
        """
        with self._lock:
            self._reap_singles()
            self._refresh_usage()
            loads = [
                WorkerLoad(rank, self._outstanding[rank], self._reported.get(rank), self._sent_since[rank])
                for rank in self._living()
            ]
        if not loads:
            raise WorkerGroupError(f"every worker of {self._group.name!r} is lost")
        return loads

    @overload
    def call(
        self,
        method: DeclaredMethod[..., Any, R, Any],
        /,
        *args: Any,
        key: Any = ...,
        timeout: float | None = ...,
        **kwargs: Any,
    ) -> MultiWorkerFuture[R]: ...

    @overload
    def call(
        self,
        method: Callable[Concatenate[Any, ...], Coroutine[Any, Any, R]],
        /,
        *args: Any,
        key: Any = ...,
        timeout: float | None = ...,
        **kwargs: Any,
    ) -> MultiWorkerFuture[R]: ...

    @overload
    def call(
        self,
        method: Callable[Concatenate[Any, ...], R],
        /,
        *args: Any,
        key: Any = ...,
        timeout: float | None = ...,
        **kwargs: Any,
    ) -> MultiWorkerFuture[R]: ...

    @overload
    def call(
        self, method: str, /, *args: Any, key: Any = ..., timeout: float | None = ..., **kwargs: Any
    ) -> MultiWorkerFuture[Any]: ...

    def call(
        self, method: Any, /, *args: Any, key: Any = None, timeout: float | None = None, **kwargs: Any
    ) -> MultiWorkerFuture[Any]:
        """Call a method on one worker, chosen by the strategy; it does not wait for anything.

        Args:
            method: The worker class's own function, or its name. A declaration on it does not count.
            *args: Its positional arguments.
            key: What the strategy goes by, such as a conversation's id; `consistent_hash` needs it.
            timeout: Deadline of the call in seconds.
            **kwargs: Its keyword arguments.

        Raises:
            TypeError: The key can't be used, or the arguments don't fit the method.
            WorkerGroupError: All workers are lost.
        """
        if self._strategy.needs_key:
            key_bytes(key)
        with self._lock:
            rank = self._strategy.choose(self.loads(), key)
            sent = self.send(rank, method_name(method), args, kwargs, timeout)
            self._singles.append(sent)
        return sent.future

    @overload
    def map(
        self,
        method: DeclaredMethod[Concatenate[T, ...], Any, R, Any],
        items: Iterable[T],
        *,
        key: Callable[[T], Any] | None = ...,
        max_outstanding: int = ...,
        window: int | None = ...,
        timeout: float | None = ...,
        common_kwargs: Mapping[str, Any] | None = ...,
    ) -> Results[R]: ...

    @overload
    def map(
        self,
        method: Callable[Concatenate[Any, T, ...], Coroutine[Any, Any, R]],
        items: Iterable[T],
        *,
        key: Callable[[T], Any] | None = ...,
        max_outstanding: int = ...,
        window: int | None = ...,
        timeout: float | None = ...,
        common_kwargs: Mapping[str, Any] | None = ...,
    ) -> Results[R]: ...

    @overload
    def map(
        self,
        method: Callable[Concatenate[Any, T, ...], R],
        items: Iterable[T],
        *,
        key: Callable[[T], Any] | None = ...,
        max_outstanding: int = ...,
        window: int | None = ...,
        timeout: float | None = ...,
        common_kwargs: Mapping[str, Any] | None = ...,
    ) -> Results[R]: ...

    @overload
    def map(
        self,
        method: str,
        items: Iterable[Any],
        *,
        key: Callable[[Any], Any] | None = ...,
        max_outstanding: int = ...,
        window: int | None = ...,
        timeout: float | None = ...,
        common_kwargs: Mapping[str, Any] | None = ...,
    ) -> Results[Any]: ...

    def map(
        self,
        method: Any,
        items: Iterable[Any],
        *,
        key: Callable[[Any], Any] | None = None,
        max_outstanding: int = 2,
        window: int | None = None,
        timeout: float | None = None,
        common_kwargs: Mapping[str, Any] | None = None,
    ) -> Results[Any]:
        """Call a method once per item, on whichever worker is free; results come in the items' order.

        For `for` and for `async for`, which reads the items in a thread of its own.

        Args:
            method: The worker class's own function, or its name; an item is its only positional argument.
            items: Read only as workers get free and results are taken, so the source may be endless.
            key: Makes the strategy's key of an item; None takes the item itself.
            max_outstanding: Most items per worker that are sent and not returned.
            window: Most items whose results may wait for an earlier item's; None for eight times what the
                workers hold.
            timeout: Deadline of each item's call in seconds.
            common_kwargs: Keyword arguments that are the same for all items.

        Raises:
            WorkerFailureError: While iterating: the method raised; or a worker was lost, and the method is
                not declared idempotent or the item was lost for the second time.
            ResultTimeoutError: While iterating: an item took longer than `timeout`.
        """
        _check_count("max_outstanding", max_outstanding)
        if window is None:
            window = 8 * max_outstanding * len(self._leaders())
        _check_count("window", window)
        stream = self._stream(method, items, key, max_outstanding, window, timeout, common_kwargs)
        return Results(_in_order(stream))

    @overload
    def as_completed(
        self,
        method: DeclaredMethod[Concatenate[T, ...], Any, R, Any],
        items: Iterable[T],
        *,
        key: Callable[[T], Any] | None = ...,
        max_outstanding: int = ...,
        timeout: float | None = ...,
        common_kwargs: Mapping[str, Any] | None = ...,
    ) -> Results[tuple[int, R]]: ...

    @overload
    def as_completed(
        self,
        method: Callable[Concatenate[Any, T, ...], Coroutine[Any, Any, R]],
        items: Iterable[T],
        *,
        key: Callable[[T], Any] | None = ...,
        max_outstanding: int = ...,
        timeout: float | None = ...,
        common_kwargs: Mapping[str, Any] | None = ...,
    ) -> Results[tuple[int, R]]: ...

    @overload
    def as_completed(
        self,
        method: Callable[Concatenate[Any, T, ...], R],
        items: Iterable[T],
        *,
        key: Callable[[T], Any] | None = ...,
        max_outstanding: int = ...,
        timeout: float | None = ...,
        common_kwargs: Mapping[str, Any] | None = ...,
    ) -> Results[tuple[int, R]]: ...

    @overload
    def as_completed(
        self,
        method: str,
        items: Iterable[Any],
        *,
        key: Callable[[Any], Any] | None = ...,
        max_outstanding: int = ...,
        timeout: float | None = ...,
        common_kwargs: Mapping[str, Any] | None = ...,
    ) -> Results[tuple[int, Any]]: ...

    def as_completed(
        self,
        method: Any,
        items: Iterable[Any],
        *,
        key: Callable[[Any], Any] | None = None,
        max_outstanding: int = 2,
        timeout: float | None = None,
        common_kwargs: Mapping[str, Any] | None = None,
    ) -> Results[tuple[int, Any]]:
        """As `map`, but gives pairs of an item's index and its result as they come.

        Args:
            method: See `map`.
            items: See `map`.
            key: See `map`.
            max_outstanding: See `map`.
            timeout: See `map`.
            common_kwargs: See `map`.

        Raises:
            WorkerFailureError: See `map`.
            ResultTimeoutError: See `map`.
        """
        _check_count("max_outstanding", max_outstanding)
        stream = self._stream(method, items, key, max_outstanding, None, timeout, common_kwargs)
        return Results(stream.pairs())

    def may_go_again(self, method: str) -> bool:
        """Whether a method is declared idempotent."""
        return method in self._idempotent

    def send(
        self, rank: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float | None
    ) -> Sent:
        """Send one call to one worker and count it."""
        future = self._group.on([rank], timeout=timeout).call(method, *args, **kwargs)
        if observed.by is not None:
            observed.by.labelled(future._own_id(), "balancer")  # noqa: SLF001 - made for this
        place = future._places.get(rank)  # noqa: SLF001 - of whom it was sent to, whoever they are by now
        known = None if place is None else place.info
        generation = self._generations()[rank] if known is None else known.generation
        with self._lock:
            self._outstanding[rank] += 1
            self._sent_since[rank] += 1
        return Sent(rank, generation, future, deadline_after(timeout))

    def returned(self, sent: Sent) -> None:
        """Count a call as returned."""
        with self._lock:
            self._outstanding[sent.rank] -= 1

    def lose(self, sent: Sent) -> None:
        """Send nothing more to a worker until it is restarted."""
        with self._lock:
            self._lost[sent.rank] = sent.generation

    def _stream(
        self,
        method: Any,
        items: Iterable[Any],
        key: Callable[[Any], Any] | None,
        max_outstanding: int,
        window: int | None,
        timeout: float | None,
        common_kwargs: Mapping[str, Any] | None,
    ) -> Stream[Sent]:
        calls = _Calls(self, method_name(method), timeout, dict(common_kwargs or {}))
        return Stream(calls, self._strategy, items, key or _itself, max_outstanding, window)

    def _leaders(self) -> list[int]:
        return sorted(group[0] for group in self._group.tied_workers_groups)

    def _generations(self) -> dict[int, int]:
        return {info.rank: info.generation for info in self._group.ranks}

    def _living(self) -> list[int]:
        now = self._generations()
        return [rank for rank in self._leaders() if self._lost.get(rank) != now[rank]]

    def _reap_singles(self) -> None:
        if not self._singles:
            return
        for sent in _done(self._singles, len(self._singles), timeout_s=0):
            self._singles.remove(sent)
            self.returned(sent)
            if sent.future._died(sent.end):  # noqa: SLF001
                sent.future._note_loss()  # noqa: SLF001
                self.lose(sent)

    def _refresh_usage(self) -> None:
        if self._usage is not None and time.monotonic() - self._reported_at >= REPORT_INTERVAL_S:
            self._reported = dict(self._usage())
            self._reported_at = time.monotonic()
            self._sent_since.clear()


@dataclass
class _Calls:
    """The workers of a balancer, for one stream."""

    balancer: LoadBalancer
    method: str
    timeout_s: float | None
    common_kwargs: Mapping[str, Any]

    def loads(self) -> Sequence[WorkerLoad]:
        return self.balancer.loads()

    def send(self, rank: int, item: Item) -> Sent:
        return self.balancer.send(rank, self.method, (item.value,), self.common_kwargs, self.timeout_s)

    def wait(self, sent: Sequence[Sent]) -> Sequence[Sent]:
        deadlines = [one.deadline for one in sent if one.deadline is not None]
        done = _done(sent, 1, timeout_s=left(min(deadlines)) if deadlines else None)
        if not done:  # its time is over: collecting it says so
            return [min((one for one in sent if one.deadline is not None), key=lambda one: one.deadline or 0)]
        return done

    def collect(self, sent: Sent) -> Any:
        self.balancer.returned(sent)
        try:
            return sent.future.get_results()[0]
        except WorkerFailureError as error:
            if error.cause is not None and is_death(error.cause):
                self.balancer.lose(sent)
                if self.balancer.may_go_again(self.method):
                    raise LostWorkerError from error
            raise

    def abandon(self, sent: Sequence[Sent]) -> None:
        for one in sent:
            self.balancer.returned(one)
            one.future.cancel()


def _in_order(stream: Stream[Sent]) -> Generator[Any, None, None]:
    early: dict[int, Any] = {}
    with contextlib.closing(stream.pairs()) as pairs:
        for index, value in pairs:
            early[index] = value
            while stream.given in early:
                value = early.pop(stream.given)
                stream.given += 1
                yield value


def _done(sent: Sequence[Sent], count: int, timeout_s: float | None) -> list[Sent]:
    """Those of some calls that have ended, once as many have or the time is over."""
    by_end = {one.end: one for one in sent}
    done = sent[0].future._wait_for(list(by_end), count, timeout_s)  # noqa: SLF001
    return [by_end[end] for end in done]


def _itself(item: Any) -> Any:
    return item


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
