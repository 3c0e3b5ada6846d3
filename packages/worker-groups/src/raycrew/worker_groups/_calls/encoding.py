"""Arguments on their way to several workers: encoded once each, large ones stored once each."""

from collections.abc import Mapping, Sequence
from typing import Any

from raycrew.worker_groups._calls.answers import MultiWorkerFuture, refuse_stream
from raycrew.worker_groups._calls.sizes import SharedStore
from raycrew.worker_groups.protocols import ArgumentTransport


class Packer:
    """Makes the arguments of one call ready for the wire, however many workers it goes to.

    Sharing is by identity: the caller keeps its arguments alive while it uses this.

    Args:
        transport: What encodes them, if anything does.
    """

    def __init__(self, transport: ArgumentTransport | None) -> None:
        self._transport = transport
        self._store = SharedStore()
        self._packed: dict[int, Any] = {}

    def pack(self, args: Sequence[Any]) -> list[Any]:
        """Positional arguments as they are sent.

        Raises:
            TypeError: One is a future whose results come as a stream.
        """
        return [self._pack(arg) for arg in args]

    def pack_named(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments as they are sent; see `pack`."""
        return {name: self._pack(value) for name, value in kwargs.items()}

    def _pack(self, value: Any) -> Any:
        key = id(value)
        if key not in self._packed and isinstance(value, MultiWorkerFuture):
            refuse_stream(value)
            self._packed[key] = (value, value._as_argument())  # noqa: SLF001 - made for this
        if key not in self._packed:
            encoded = value if self._transport is None else self._transport.encode(value)
            # `encoded` is kept so that its identity, by which it is stored, is not given to another object.
            self._packed[key] = (encoded, self._store.share(encoded))
        return self._packed[key][1]
