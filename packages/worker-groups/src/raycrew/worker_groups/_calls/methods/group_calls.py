"""The calls of a group: which ranks get what, by name or typed; how they are sent is up to the group."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

from raycrew.worker_groups._calls.answers import MultiWorkerFuture
from raycrew.worker_groups._calls.methods.callees import Callee, RankCallee
from raycrew.worker_groups._calls.methods.dispatch import (
    OnlyOn,
    dispatch_multiple,
    dispatch_sharded,
    dispatch_single,
)
from raycrew.worker_groups._calls.methods.typed import WholeCalls

J = TypeVar("J")


class GroupCalls(WholeCalls):
    """What can be called on a group; see the methods."""

    @overload
    def on(
        self, ranks: None = ..., *, leaders: Literal[False] = ..., timeout: float | None = ...
    ) -> Callee: ...

    @overload
    def on(
        self, ranks: Sequence[int], *, leaders: Literal[False] = ..., timeout: float | None = ...
    ) -> RankCallee: ...

    @overload
    def on(self, ranks: None = ..., *, leaders: Literal[True], timeout: float | None = ...) -> RankCallee: ...

    def on(
        self, ranks: Sequence[int] | None = None, *, leaders: bool = False, timeout: float | None = None
    ) -> Callee | RankCallee:
        """Some ranks (all for None, or tied groups' leaders), and a deadline in seconds for calls on them.

        Where ranks or leaders are named, a declaration on the method that is called does not count.
        """
        if ranks is None and not leaders:
            return Callee(self, timeout)
        return RankCallee(self, ranks, timeout, leaders)

    def run_all_workers_single_data(
        self,
        method_name: str,
        *args: Any,
        only_on: OnlyOn = "all",
        run_rank_0_only_axes: Sequence[str] = (),
        timeout: float | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture[Any]:
        """Call a method with the same arguments on every rank, or on those that are asked for.

        Args:
            method_name: The method.
            *args: Its positional arguments; large ones are stored once.
            only_on: "all" ranks; "tied_leader": the leader of each tied group; "all_tied_workers": all ranks,
                but results of the leaders only.
            run_rank_0_only_axes: Axes on which only coordinate 0 is called.
            timeout: Deadline of the call in seconds.
            **kwargs: Its keyword arguments.

        Raises:
            UnknownMethodError: The class has no such method.
            TypeError: The arguments don't fit its signature.
            ValueError: An axis is unknown.
        """
        dispatch = dispatch_single(
            self._open(),
            method_name,
            args,
            kwargs,
            only_on=only_on,
            run_rank_0_only_axes=run_rank_0_only_axes,
        )
        return self._send(dispatch, timeout)

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *args: Any,
        common_kwargs: Mapping[str, Any] | None = None,
        only_on: OnlyOn = "all",
        run_rank_0_only_axes: Sequence[str] = (),
        allow_partial: bool = False,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture[Any]:
        """Call a method with one item of each argument per rank, or per tied group.

        Args:
            method_name: The method.
            *args: One sequence (or shardable) per positional argument, with an item for each rank that is
                called, or for each tied group when `only_on` is not "all".
            common_kwargs: Keyword arguments that are the same for all.
            only_on: See `run_all_workers_single_data`.
            run_rank_0_only_axes: Axes on which only coordinate 0 is called.
            allow_partial: Whether fewer items may be given, to call only as many.
            timeout: Deadline of the call in seconds.
            **kwargs: One sequence per keyword argument.

        Raises:
            UnknownMethodError: The class has no such method.
            TypeError: An argument can't be split, or the items don't fit the signature.
            ValueError: The numbers of items are wrong; nothing has been sent.
        """
        dispatch = dispatch_multiple(
            self._open(),
            method_name,
            args,
            kwargs,
            common_kwargs=common_kwargs,
            only_on=only_on,
            run_rank_0_only_axes=run_rank_0_only_axes,
            allow_partial=allow_partial,
        )
        return self._send(dispatch, timeout)

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *args: Any,
        in_sharded_axes: Sequence[str] = (),
        replicate_on_axes: Sequence[str] = (),
        output_is_replicated: Sequence[str] = (),
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: Mapping[str, Any] | None = None,
        allow_partial: bool = False,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture[Any]:
        """Call a method with arguments that are split over named axes.

        Args:
            method_name: The method.
            *args: One nested sequence (or shardable) per positional argument: items by coordinate of the
                first of `in_sharded_axes`, each by coordinate of the second, and so on.
            in_sharded_axes: Axes that arguments are split over, outermost first.
            replicate_on_axes: Axes whose ranks all get the same item, which is stored once.
            output_is_replicated: Axes of which only coordinate 0's results are returned.
            make_dummy_calls_to_free_axes: Axes that are named nowhere are free: only coordinate 0 is called.
                With this the others are called too, with None for each argument.
            common_kwargs: Keyword arguments that are the same for all.
            allow_partial: Whether fewer items may be given, to call only as many.
            timeout: Deadline of the call in seconds.
            **kwargs: One nested sequence per keyword argument.

        Raises:
            UnknownMethodError: The class has no such method.
            TypeError: An argument can't be split, or the items don't fit the signature.
            ValueError: Axes or numbers of items are wrong; nothing has been sent.
        """
        dispatch = dispatch_sharded(
            self._open(),
            method_name,
            args,
            kwargs,
            in_sharded_axes=in_sharded_axes or (),
            replicate_on_axes=replicate_on_axes or (),
            output_is_replicated=output_is_replicated or (),
            make_dummy_calls_to_free_axes=make_dummy_calls_to_free_axes,
            common_kwargs=common_kwargs,
            allow_partial=allow_partial,
        )
        return self._send(dispatch, timeout)

    def run_rank_zero(
        self, method_name: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> MultiWorkerFuture[Any]:
        """Call a method on rank 0 only."""
        return self.run_single_worker_single_data(method_name, 0, *args, timeout=timeout, **kwargs)

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> MultiWorkerFuture[Any]:
        """Call a method on one rank only."""
        dispatch = dispatch_single(self._open(), method_name, args, kwargs, ranks=[worker_idx])
        return self._send(dispatch, timeout)

    def get_all_worker_results(
        self, future_bundle: MultiWorkerFuture[Any, J], timeout: float | None = None
    ) -> J:
        """The same as `future_bundle.get_results(timeout=timeout)`."""
        return future_bundle.get_results(timeout=timeout)


def unknown_attribute(group: object, name: str, methods: Collection[str]) -> AttributeError:
    """The error for an attribute that a group lacks; points at the way to call a method of its workers."""
    text = f"{type(group).__name__!r} object has no attribute {name!r}"
    if not name.startswith("_") and name in methods:
        text += f"; on its workers, call({name!r}, …) calls that method"
    return AttributeError(text, name=name, obj=group)
