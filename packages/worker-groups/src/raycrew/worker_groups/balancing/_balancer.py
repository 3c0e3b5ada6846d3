"""Calls spread over the workers of a group, one worker each."""

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Concatenate, TypeVar, overload

from raycrew.worker_groups._calls import MultiWorkerFuture, Results, method_name, refuse_as_items
from raycrew.worker_groups._worker import AsyncOrDeclared, SyncMethod
from raycrew.worker_groups.balancing._strategies import WorkerLoad, key_bytes, strategy_of
from raycrew.worker_groups.balancing._stream import GoneWorkerError, Stream
from raycrew.worker_groups.balancing._workload import BalancedGroup, Sent, StreamedCalls, Workload

R = TypeVar("R")
T = TypeVar("T")


class LoadBalancer(Workload):
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
        absent: Ranks to leave out for now, as they are being replaced. Where it is given, items of a lost
            worker go to another one at once, rather than wait until it was replaced.

    Raises:
        ValueError: No strategy has that name, or one that needs reports was given no `usage`.

    Examples:
        >>> class Upper:
        ...     def upper(self, text: str) -> str:
        ...         return text.upper()
        >>> with RayWorkerGroup(cluster, Upper, enable_load_balancing=True) as group:
        ...     print(list(group.balancer.map(Upper.upper, ["a", "b", "c"])))
        ['A', 'B', 'C']
    """

    def __init__(
        self,
        group: BalancedGroup,
        strategy: str | Callable[[Sequence[WorkerLoad], Any], int] = "round_robin",
        *,
        idempotent_methods: Iterable[str] = (),
        usage: Callable[[], Mapping[int, float]] | None = None,
        absent: Callable[[], Collection[int]] | None = None,
    ) -> None:
        self._strategy = strategy_of(strategy)
        if self._strategy.needs_usage and usage is None:
            raise ValueError(f"the strategy {strategy!r} needs reports of resource use: usage=")
        super().__init__(group, idempotent_methods, usage if self._strategy.needs_usage else None, absent)

    @property
    def needs_key(self) -> bool:
        """Whether `call` needs a key."""
        return self._strategy.needs_key

    @overload
    def call(
        self,
        method: AsyncOrDeclared[..., R],
        /,
        *args: Any,
        key: Any = ...,
        timeout: float | None = ...,
        **kwargs: Any,
    ) -> MultiWorkerFuture[R]: ...

    @overload
    def call(
        self,
        method: SyncMethod[..., R],
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
        """Call a method on one worker, chosen by the strategy; waits only where that one is being replaced.

        Args:
            method: The worker class's own function, or its name. A declaration on it does not count.
            *args: Its positional arguments.
            key: What the strategy goes by, such as a conversation's id; `consistent_hash` needs it.
            timeout: Deadline of the call in seconds.
            **kwargs: Its keyword arguments. One that it calls `key` or `timeout` is given by position.

        Raises:
            TypeError: The key can't be used, or the arguments don't fit the method.
            WorkerGroupError: All workers are lost.
        """
        if self._strategy.needs_key:
            key_bytes(key)
        while True:
            with self._lock:
                rank = self._strategy.choose(self.loads(), key)
                self._count(rank, 1)
            with contextlib.suppress(GoneWorkerError):  # without the lock: others need not wait for that one
                sent = self._send_counted(rank, method_name(method), args, kwargs, timeout)
                with self._lock:
                    self._singles.append(sent)
                return sent.future

    @overload
    def map(
        self,
        method: AsyncOrDeclared[Concatenate[T, ...], R],
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
        method: SyncMethod[Concatenate[T, ...], R],
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
        if window is not None:
            _check_count("window", window)
        wanted = window or (lambda: 8 * max_outstanding * len(self._leaders()))
        stream = self._stream(method, items, key, max_outstanding, wanted, timeout, common_kwargs)
        return Results(_in_order(stream))

    @overload
    def as_completed(
        self,
        method: AsyncOrDeclared[Concatenate[T, ...], R],
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
        method: SyncMethod[Concatenate[T, ...], R],
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

    def _stream(
        self,
        method: Any,
        items: Iterable[Any],
        key: Callable[[Any], Any] | None,
        max_outstanding: int,
        window: int | Callable[[], int] | None,
        timeout: float | None,
        common_kwargs: Mapping[str, Any] | None,
    ) -> Stream[Sent]:
        refuse_as_items(items, "items")
        calls = StreamedCalls(self, method_name(method), timeout, dict(common_kwargs or {}))
        return Stream(calls, self._strategy, items, key or _itself, max_outstanding, window)


def _in_order(stream: Stream[Sent]) -> Generator[Any, None, None]:
    early: dict[int, Any] = {}
    with contextlib.closing(stream.pairs()) as pairs:
        for index, value in pairs:
            early[index] = value
            while stream.given in early:
                value = early.pop(stream.given)
                stream.given += 1
                yield value


def _itself(item: Any) -> Any:
    return item


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int | Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
