"""Calls that type checkers understand: `group.call(Worker.step, batch)`, `group.on(ranks=[0]).call(…)`."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from raycrew.worker_groups._calls.answers import MultiWorkerFuture, Results
from raycrew.worker_groups._calls.methods.declared import check_promise, dispatch_declared
from raycrew.worker_groups._calls.methods.dispatch import OnlyOn, dispatch_sharded, dispatch_single
from raycrew.worker_groups._calls.methods.shape import Dispatch, GroupShape
from raycrew.worker_groups._worker import AsyncMethod, AsyncOrDeclared, DeclaredMethod, SyncMethod

P = ParamSpec("P")
R = TypeVar("R")
J = TypeVar("J")

_Yielding = Callable[Concatenate[Any, P], AsyncIterable[R] | Iterable[R]]

# Overloads with a `timeout` of their own are for calls whose method has no such parameter: a `ParamSpec`
# can't have it at its side. Mypy takes them for calls that those with a `ParamSpec` match.


class TypedCalls(ABC):
    """Calls on a group, or on some of its ranks (see `callees`)."""

    _ranks: Sequence[int] | None = None
    _only_on: OnlyOn = "all"
    _timeout: float | None = None

    @abstractmethod
    def _open(self) -> GroupShape:
        """The group's shape; raises if the group was shut down."""

    @abstractmethod
    def _send(self, dispatch: Dispatch, timeout: float | None) -> MultiWorkerFuture[Any, Any]:
        """Send each call of a dispatch."""

    def _call_plain(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method with the same arguments, whatever it declares."""
        shape = self._open()
        timeout, kwargs = _deadline_of(shape, name, kwargs, self._timeout)
        sends = dispatch_single(shape, name, args, kwargs, ranks=self._ranks, only_on=self._only_on)
        return self._send(sends, timeout)

    @overload
    def call_sharded(
        self,
        method: AsyncOrDeclared[..., R],
        /,
        *args: Any,
        in_sharded_axes: Sequence[str],
        replicate_on_axes: Sequence[str] = ...,
        output_is_replicated: Sequence[str] = ...,
        **kwargs: Any,
    ) -> MultiWorkerFuture[R]: ...

    @overload
    def call_sharded(
        self,
        method: SyncMethod[..., R],
        /,
        *args: Any,
        in_sharded_axes: Sequence[str],
        replicate_on_axes: Sequence[str] = ...,
        output_is_replicated: Sequence[str] = ...,
        **kwargs: Any,
    ) -> MultiWorkerFuture[R]: ...

    @overload
    def call_sharded(
        self,
        method: str,
        /,
        *args: Any,
        in_sharded_axes: Sequence[str],
        replicate_on_axes: Sequence[str] = ...,
        output_is_replicated: Sequence[str] = ...,
        **kwargs: Any,
    ) -> MultiWorkerFuture[Any]: ...

    def call_sharded(
        self,
        method: Any,
        /,
        *args: Any,
        in_sharded_axes: Sequence[str],
        replicate_on_axes: Sequence[str] = (),
        output_is_replicated: Sequence[str] = (),
        **kwargs: Any,
    ) -> MultiWorkerFuture[Any]:
        """As `run_all_workers_sharded_data`, for a method that may be given as itself.

        Result types are checked statically; arguments, which hold items of what the method takes, are not.

        Raises:
            UnknownMethodError: The class has no such method.
            TypeError: An argument can't be split, or the items don't fit the signature.
            ValueError: Axes or numbers of items are wrong, or these are not all ranks; nothing has been sent.
        """
        if self._ranks is not None or self._only_on != "all":
            raise ValueError(
                "sharded calls go by the axes of the whole group: use on() without ranks or leaders"
            )
        dispatch = dispatch_sharded(
            self._open(),
            method_name(method),
            args,
            kwargs,
            in_sharded_axes=in_sharded_axes,
            replicate_on_axes=replicate_on_axes,
            output_is_replicated=output_is_replicated,
        )
        return self._send(dispatch, self._timeout)

    @overload
    def stream(
        self, method: _Yielding[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Results[tuple[int, R]]: ...

    @overload
    def stream(  # type: ignore[overload-cannot-match]
        self, method: _Yielding[..., R], /, *args: Any, timeout: float | None, **kwargs: Any
    ) -> Results[tuple[int, R]]: ...

    @overload
    def stream(
        self, method: str, /, *args: Any, timeout: float | None = ..., **kwargs: Any
    ) -> Results[tuple[int, Any]]: ...

    def stream(
        self, method: Callable[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> Results[tuple[int, Any]]:
        """Call a generator method; gives pairs of rank and item as any rank yields one.

        For `for` and for `async for`.

        Raises:
            TypeError: It is no generator method, or the arguments don't fit its signature.
            UnknownMethodError: The class has no such method.
            WorkerFailureError: While iterating: a rank failed.
        """
        name = method_name(method)
        if "generator" not in (kind := self._open().method(name).kind):
            raise TypeError(f"{name} is {kind}, not a generator method")
        return self._call_plain(name, args, kwargs).as_completed()  # type: ignore[no-any-return]


class WholeCalls(TypedCalls):
    """Calls on a whole group, in which a method's own declaration counts."""

    @overload
    def call(
        self, method: DeclaredMethod[P, Any, R, J], /, *args: P.args, **kwargs: P.kwargs
    ) -> MultiWorkerFuture[R, J]: ...

    @overload
    def call(
        self, method: AsyncMethod[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> MultiWorkerFuture[R]: ...

    @overload
    def call(
        self, method: SyncMethod[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> MultiWorkerFuture[R]: ...

    @overload
    def call(
        self, method: DeclaredMethod[..., Any, R, J], /, *args: Any, timeout: float | None, **kwargs: Any
    ) -> MultiWorkerFuture[R, J]: ...

    @overload
    def call(  # type: ignore[overload-cannot-match]
        self, method: AsyncMethod[..., R], /, *args: Any, timeout: float | None, **kwargs: Any
    ) -> MultiWorkerFuture[R]: ...

    @overload
    def call(  # type: ignore[overload-cannot-match]
        self, method: SyncMethod[..., R], /, *args: Any, timeout: float | None, **kwargs: Any
    ) -> MultiWorkerFuture[R]: ...

    @overload
    def call(
        self, method: str, /, *args: Any, timeout: float | None = ..., **kwargs: Any
    ) -> MultiWorkerFuture[Any, Any]: ...

    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> MultiWorkerFuture[Any, Any]:
        """Call a method, given as the worker class's own function or by name.

        As the method says where it is declared (`sharded`, `replicated`, `rank_zero`, `per_rank`): then the
        results are made one value. Else with the same arguments on every rank, for the list of results.

        `timeout=` is the call's deadline in seconds, unless the method has a parameter of that name; then the
        method gets it, and the deadline is set with `on(timeout=…)`. Type checkers check the other arguments
        only where `timeout=` is not among them; `on(timeout=…)` has them checked too.

        Raises:
            UnknownMethodError: The class has no such method.
            TypeError: The arguments don't fit its signature, can't be split as it declares, or the function
                that was given is declared otherwise than the class's method.
            ValueError: The group lacks the axis that the method names, rows don't divide among its
                coordinates, or numbers of rows or items are wrong; nothing has been sent.
        """
        shape = self._open()
        name = method_name(method)
        if name is not method:
            check_promise(shape, method, name)
        if shape.method(name).declared is None:
            return self._call_plain(name, args, kwargs)  # type: ignore[no-any-return]
        timeout, kwargs = _deadline_of(shape, name, kwargs, self._timeout)
        return self._send(dispatch_declared(shape, name, args, kwargs), timeout)


def method_name(method: Callable[..., Any] | str) -> str:
    """The name of a method that is given as itself or by name.

    Raises:
        TypeError: It is neither.
    """
    name = method if isinstance(method, str) else getattr(method, "__name__", None)
    if not isinstance(name, str):
        raise TypeError(f"a method is given as a function of its class or by name, not {method!r}")
    return name


def _deadline_of(
    shape: GroupShape, name: str, kwargs: Mapping[str, Any], timeout: float | None
) -> tuple[float | None, dict[str, Any]]:
    if "timeout" not in kwargs or "timeout" in shape.method(name).signature.parameters:
        return timeout, dict(kwargs)
    rest = dict(kwargs)
    return rest.pop("timeout"), rest
