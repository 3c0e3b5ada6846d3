"""Sending what was dispatched to Ray actors."""

from collections.abc import Mapping, Sequence
from typing import Any

from raycrew.worker_groups._dispatch import Dispatch
from raycrew.worker_groups._failures import Whereabouts
from raycrew.worker_groups._futures import MultiWorkerFuture
from raycrew.worker_groups._shell import Gathered
from raycrew.worker_groups._sizes import SharedStore
from raycrew.worker_groups.protocols import ArgumentTransport


def send_to_actors(
    dispatch: Dispatch,
    handles: Sequence[Any],
    places: Mapping[int, Whereabouts],
    *,
    group_name: str,
    transport: ArgumentTransport | None,
    timeout: float | None,
) -> MultiWorkerFuture[Any]:
    """Send each call straight to its rank's actor.

    Args:
        dispatch: Who gets what.
        handles: Actors in rank order.
        places: Where each rank is, for errors.
        group_name: Name of the group, for errors.
        transport: Encodes arguments.
        timeout: Deadline of the call in seconds.
    """
    packer = _Packer(transport)
    name = dispatch.method.name
    refs = [
        getattr(handles[send.rank], name).remote(*packer.pack(send.args), **packer.pack_named(send.kwargs))
        for send in dispatch.sends
    ]
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
    )


class _Packer:
    """Makes one call's arguments ready for the wire: encoded once each, large ones stored once each."""

    def __init__(self, transport: ArgumentTransport | None) -> None:
        self._transport = transport
        self._store = SharedStore()
        self._packed: dict[int, Any] = {}

    def pack(self, args: Sequence[Any]) -> list[Any]:
        return [self._pack(arg) for arg in args]

    def pack_named(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._pack(value) for name, value in kwargs.items()}

    def _pack(self, value: Any) -> Any:
        if isinstance(value, MultiWorkerFuture):
            return Gathered(tuple(value))
        key = id(value)
        if key not in self._packed:
            encoded = value if self._transport is None else self._transport.encode(value)
            # `encoded` is kept so that its identity, by which it is stored, is not given to another object.
            self._packed[key] = (encoded, self._store.share(encoded))
        return self._packed[key][1]
