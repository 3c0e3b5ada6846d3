"""A group, or some of its ranks, with a deadline for calls on them."""

from collections.abc import Sequence
from typing import Any, ParamSpec, TypeVar, overload

from raycrew.worker_groups._calls.answers import MultiWorkerFuture
from raycrew.worker_groups._calls.methods.shape import Dispatch, GroupShape
from raycrew.worker_groups._calls.methods.typed import TypedCalls, WholeCalls, method_name
from raycrew.worker_groups._worker import AsyncOrDeclared, SyncMethod

P = ParamSpec("P")
R = TypeVar("R")


class PartOfGroup(TypedCalls):
    """Calls that go through a group."""

    _group: TypedCalls

    def _open(self) -> GroupShape:
        return self._group._open()  # noqa: SLF001 - a part of it

    def _send(self, dispatch: Dispatch, timeout: float | None) -> MultiWorkerFuture[Any, Any]:
        return self._group._send(dispatch, timeout)  # noqa: SLF001


class Callee(PartOfGroup, WholeCalls):
    """A group, with a deadline for calls on it.

    Args:
        group: The group.
        timeout: Deadline of each call in seconds, or None.
    """

    def __init__(self, group: TypedCalls, timeout: float | None = None) -> None:
        self._group, self._timeout = group, timeout


class RankCallee(PartOfGroup):
    """Some ranks of a group, to be called with the same arguments, whatever a method declares.

    Args:
        group: The group.
        ranks: Ranks to call, or None for all.
        timeout: Deadline of each call in seconds, or None.
        leaders: Whether only the leader of each tied group is called.

    Raises:
        ValueError: Both ranks and leaders are asked for, or a rank is not the group's.
    """

    def __init__(
        self,
        group: TypedCalls,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
        leaders: bool = False,
    ) -> None:
        if leaders and ranks is not None:
            raise ValueError("give ranks or leaders=True, not both")
        self._group = group
        self._only_on = "tied_leader" if leaders else "all"
        self._ranks = None if ranks is None else self._open().check_ranks(ranks)
        self._timeout = timeout

    @overload
    def call(
        self, method: AsyncOrDeclared[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> MultiWorkerFuture[R]: ...

    @overload
    def call(
        self, method: SyncMethod[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> MultiWorkerFuture[R]: ...

    @overload
    def call(
        self, method: AsyncOrDeclared[..., R], /, *args: Any, timeout: float | None, **kwargs: Any
    ) -> MultiWorkerFuture[R]: ...

    @overload
    def call(  # type: ignore[overload-cannot-match]
        self, method: SyncMethod[..., R], /, *args: Any, timeout: float | None, **kwargs: Any
    ) -> MultiWorkerFuture[R]: ...

    @overload
    def call(
        self, method: str, /, *args: Any, timeout: float | None = ..., **kwargs: Any
    ) -> MultiWorkerFuture[Any]: ...

    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> MultiWorkerFuture[Any]:
        """Call a method, given as the worker class's own function or by name, with the same arguments.

        A declaration on the method does not count here. For `timeout=` see `group.call`.

        Raises:
            UnknownMethodError: The class has no such method.
            TypeError: The arguments don't fit its signature.
        """
        return self._call_plain(method_name(method), args, kwargs)  # type: ignore[no-any-return]
