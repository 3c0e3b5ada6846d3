"""Where buckets lie: in Ray's object store, or wherever a transport has them."""

from typing import Any, Protocol, runtime_checkable

import numpy as np

from raycrew.tensor_transport._ray import RayByteStore
from raycrew.tensor_transport.protocols import Bytes, ByteStore
from raycrew.tensor_transport.transports import Offer, PullTransport


@runtime_checkable
class BroadcastStore(ByteStore, Protocol):
    """A store that may send what is put to all receivers of an update, which take part all together."""

    def begin(self, key: str, timeout_s: float | None = None) -> bool:
        """A version begins; with a key, receivers that know it take part. Whether what is put is sent."""
        ...

    def abandon(self) -> None:
        """This process does not go on: whoever waits for it need not."""
        ...


class TransportByteStore:
    """Bytes that a transport offers; tickets are its offers.

    Where the transport maps, as that of shared memory does, all readers of a node have the same bytes in
    place; else each pulls a copy of its own.
    """

    def __init__(self, transport: PullTransport) -> None:
        self._transport = transport
        self.gives_own_memory = not transport.capabilities.maps
        self.release_scope: str | None = getattr(transport, "release_scope", None)

    def put(self, data: Bytes) -> Offer:
        """Offer a copy of `data`."""
        lent = data if self._transport.capabilities.keeps_copy else data.copy()
        return self._transport.offer(lent)

    def get(self, ticket: Offer, timeout_s: float | None = None) -> Bytes:
        """The bytes, in place where the transport can."""
        if self._transport.capabilities.maps:
            return self._transport.map(ticket, timeout_s=timeout_s)
        data = np.empty(ticket.size_bytes, np.uint8)
        self._transport.pull([ticket.whole], [data], timeout_s=timeout_s).wait()
        return data

    def release(self, ticket: Offer) -> None:
        """Withdraw the offer."""
        self._transport.withdraw([ticket])


def as_store(store: ByteStore | PullTransport | None) -> ByteStore:
    """A store: what a transport offers, or Ray's object store for None."""
    if store is None:
        return RayByteStore()
    found: Any = store
    return TransportByteStore(found) if isinstance(store, PullTransport) else found


def release_scope(store: ByteStore, own: str) -> str:
    """Who can release what is put into a store: all with the same scope; "" where nobody has to.

    Args:
        store: The store.
        own: The scope of a store that says nothing: what it has, it alone can release.
    """
    scope: str | None = getattr(store, "release_scope", None)
    return own if scope is None else scope


def abandon(store: ByteStore) -> None:
    """Tell others that this process does not go on, where they may wait for it."""
    if isinstance(store, BroadcastStore):
        store.abandon()
