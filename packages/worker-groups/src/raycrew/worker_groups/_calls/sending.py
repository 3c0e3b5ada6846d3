"""Sending what was dispatched to Ray actors."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import ray

from raycrew.cluster_core import Session
from raycrew.worker_groups._calls.answers import MultiWorkerFuture, Recovery, Whereabouts
from raycrew.worker_groups._calls.encoding import Packer
from raycrew.worker_groups._calls.methods import Dispatch
from raycrew.worker_groups._health import observed
from raycrew.worker_groups._ray import call_id, check_session, while_connected
from raycrew.worker_groups._worker import Gathered
from raycrew.worker_groups.errors import WorkerGroupError
from raycrew.worker_groups.protocols import ArgumentTransport


def send_to_actors(
    dispatch: Dispatch,
    handles: Sequence[Any],
    places: Mapping[int, Whereabouts],
    *,
    group_name: str,
    transport: ArgumentTransport | None,
    timeout: float | None,
    in_order: bool,
    keeper: object,
    session: Session,
    recovery: Recovery | None = None,
    diagnose: Callable[[WorkerGroupError, Hashable], object] | None = None,
) -> MultiWorkerFuture[Any, Any]:
    """Send each call straight to its rank's actor, once all arguments of all ranks are ready.

    Args:
        dispatch: Who gets what.
        handles: Actors in rank order.
        places: Where each rank is, for errors.
        group_name: Name of the group, for errors.
        transport: Encodes arguments.
        timeout: Deadline of the call in seconds.
        in_order: Whether the workers run their calls one after the other.
        keeper: What keeps the workers, held by the future.
        session: The connection to Ray that the actors belong to.
        recovery: What becomes of the call should a worker die.
        diagnose: Has an error of the call say where a diagnosis lies.

    Raises:
        TypeError: An argument can't be pickled, or is a stream; nothing has been sent.
        WorkerGroupClosedError: The connection has ended.
    """
    packer = Packer(transport)
    name = dispatch.method.name
    observer = observed.by
    at = 0.0 if observer is None else observer.about_to_send(group_name, places)
    called = f"{group_name}.{name}"
    with while_connected(partial(check_session, session, called)):
        packed = [
            (send.rank, packer.pack(send.args), packer.pack_named(send.kwargs)) for send in dispatch.sends
        ]
        _check_picklable(packed, called)
        refs = [getattr(handles[rank], name).remote(*args, **kwargs) for rank, args, kwargs in packed]
    if observer is not None:
        ranks, calls = [send.rank for send in dispatch.sends], [call_id(ref) for ref in refs]
        observer.sent(at, group_name, name, ranks, calls)
    return MultiWorkerFuture(
        refs,
        [send.rank for send in dispatch.sends],
        dispatch.return_from,
        dispatch.respect_tied_workers,
        method=name,
        group_name=group_name,
        places=places,
        timeout=timeout,
        is_stream="generator" in dispatch.method.kind,
        in_order=in_order,
        keeper=keeper,
        session=session,
        recovery=recovery,
        join=dispatch.join,
        diagnose=diagnose,
    )


_Packed = tuple[int, list[Any], dict[str, Any]]

_PLAIN = (int, float, str, bytes, bool, type(None), Gathered)


def _check_picklable(packed: Sequence[_Packed], called: str) -> None:
    """Raise if an argument of a later rank can't be pickled; the first rank's are, before any is sent."""
    if len(packed) < 2:
        return
    known = {id(value) for value in _values(packed[0])}
    for rank, value in ((call[0], value) for call in packed[1:] for value in _values(call)):
        if id(value) in known or _is_plain(value):
            continue
        known.add(id(value))
        try:
            ray.put(value)  # Ray's own pickling; this copy is gone at once.
        except Exception as error:
            raise TypeError(f"{called}: an argument of rank {rank} can't be pickled: {error}") from error


def _is_plain(value: Any) -> bool:
    """Whether a value can surely be pickled: numbers, strings, arrays of numbers, and containers of these."""
    if type(value) in _PLAIN or isinstance(value, ray.ObjectRef):
        return True
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, (*value.keys(), *value.values())))
    return getattr(getattr(value, "dtype", None), "hasobject", True) is False


def _values(call: _Packed) -> list[Any]:
    return [*call[1], *call[2].values()]
