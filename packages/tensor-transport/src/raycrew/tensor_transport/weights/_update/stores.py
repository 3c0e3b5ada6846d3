"""Where buckets lie: in Ray's object store, or wherever a transport has them."""

from typing import Any, Protocol, runtime_checkable

import torch

from raycrew.tensor_transport._bytes import private_copy, tensor_over
from raycrew.tensor_transport._ray import RayByteStore
from raycrew.tensor_transport.errors import TransportError
from raycrew.tensor_transport.protocols import Bytes, ByteStore
from raycrew.tensor_transport.transports import Offer, PullTransport, ReservingTransport
from raycrew.tensor_transport.weights._update.devices import CPU, fresh_bucket

_BUCKET_BYTES = 16 << 20
_SHARED_BUCKET_BYTES = 128 << 20


@runtime_checkable
class TensorStore(ByteStore, Protocol):
    """A store that takes and gives buckets as tensors of uint8, of one dimension, on a device."""

    @property
    def device(self) -> torch.device:
        """Where what is put next is best packed."""
        ...

    def put_tensor(self, data: torch.Tensor) -> Any:
        """As `put`; it waits for what the calling thread's stream does to them."""
        ...

    def get_tensor(self, ticket: Any, timeout_s: float | None = None) -> torch.Tensor:
        """As `get`; on a device they are there for the calling thread's stream."""
        ...


@runtime_checkable
class BroadcastStore(TensorStore, Protocol):
    """A store that may send what is put to all receivers of an update, which take part all together."""

    def begin(self, key: str, timeout_s: float | None = None) -> bool:
        """A version begins; with a key, receivers that know it take part. Whether what is put is sent."""
        ...

    def abandon(self) -> None:
        """This process does not go on: whoever waits for it need not."""
        ...


@runtime_checkable
class ReservingStore(ByteStore, Protocol):
    """A store that may have memory of its own to pack a bucket into."""

    def reserve_tensor(self, size_bytes: int) -> tuple[Any, torch.Tensor] | None:
        """A ticket, and its memory on the CPU: the bucket is there once it is written; None without."""
        ...


class TransportByteStore:
    """Bytes that a transport offers; tickets are its offers.

    Where the transport maps, as that of shared memory does, all readers of a node have the same bytes in
    place; else each pulls a copy of its own.

    Args:
        transport: What has them.
        device: Where they are to be on this side, if the transport knows it; else on the CPU.
    """

    def __init__(self, transport: PullTransport, device: torch.device = CPU) -> None:
        self._transport = transport
        self._reserving = transport if isinstance(transport, ReservingTransport) else None
        self.device = device if device.type in transport.capabilities.devices else CPU
        can = transport.capabilities
        self.gives_own_memory = not can.maps
        self.shares_memory = can.maps and can.reach == "node"
        self.release_scope: str | None = getattr(transport, "release_scope", None)
        self.ticket_type = Offer

    def put(self, data: Bytes) -> Offer:
        """Offer a copy of `data`."""
        return self.put_tensor(_over(data))

    def put_tensor(self, data: torch.Tensor) -> Offer:
        """Offer a copy of `data`, in place of which nothing is needed of it any more."""
        there = data.to(self.device)
        is_copy = there is not data or self._transport.capabilities.keeps_copy
        return self._transport.offer(there if is_copy else private_copy(there))

    def reserve_tensor(self, size_bytes: int) -> tuple[Offer, torch.Tensor] | None:
        """See `reserve`."""
        if self._reserving is None:
            return None
        offer, room = self._reserving.reserve(size_bytes)
        try:
            return offer, _over(room)
        except BaseException:  # an interrupt, say
            self._transport.withdraw([offer])
            raise

    def get(self, ticket: Offer, timeout_s: float | None = None) -> Bytes:
        """The bytes, in place where the transport can."""
        if self._transport.capabilities.maps:
            return self._transport.map(ticket, timeout_s=timeout_s)
        return self._pulled(ticket, timeout_s).cpu().numpy()

    def get_tensor(self, ticket: Offer, timeout_s: float | None = None) -> torch.Tensor:
        """The bytes, in place where the transport can."""
        if self._transport.capabilities.maps:
            return _over(self._transport.map(ticket, timeout_s=timeout_s))
        return self._pulled(ticket, timeout_s)

    def release(self, ticket: Offer) -> None:
        """Withdraw the offer."""
        self._transport.withdraw([ticket])

    def _pulled(self, ticket: Offer, timeout_s: float | None) -> torch.Tensor:
        data = fresh_bucket(ticket.size_bytes, self.device)
        self._transport.pull([ticket.whole], [data], timeout_s=timeout_s).wait()
        return data


def bucket_bytes_for(store: ByteStore) -> int:
    """How large buckets are best: in memory that a node shares no copy waits for them, only messages do."""
    return _SHARED_BUCKET_BYTES if shares_memory(store) else _BUCKET_BYTES


def shares_memory(store: ByteStore) -> bool:
    """Whether all of a node have a bucket without a copy; a store may say something else later."""
    return bool(getattr(store, "shares_memory", False))


def device_of(store: ByteStore) -> torch.device:
    """Where buckets for a store are best packed."""
    return store.device if isinstance(store, TensorStore) else CPU


def put_tensor(store: ByteStore, data: torch.Tensor) -> Any:
    """Put a bucket into any store."""
    return store.put_tensor(data) if isinstance(store, TensorStore) else store.put(data.cpu().numpy())


def reserve(store: ByteStore, size_bytes: int) -> tuple[Any, torch.Tensor] | None:
    """Memory of a store's own for a bucket, and the ticket that it has once it is written; None without."""
    if isinstance(store, TransportByteStore | ReservingStore):  # A class answers faster.
        return store.reserve_tensor(size_bytes)
    return None


def get_tensor(store: ByteStore, ticket: Any, timeout_s: float | None = None) -> torch.Tensor:
    """Get a bucket out of any store.

    Raises:
        TransportError: A store of another kind has put it.
    """
    _check_ticket(store, ticket)
    if isinstance(store, TransportByteStore | TensorStore):  # Each bucket asks: a class answers faster.
        return store.get_tensor(ticket, timeout_s)
    return _over(store.get(ticket, timeout_s))


def _check_ticket(store: ByteStore, ticket: object) -> None:
    if not isinstance(ticket, getattr(store, "ticket_type", object)):
        raise TransportError(
            f"a {type(store).__name__} can't get what is known by a {type(ticket).__name__}: publishers and "
            "receivers need stores of one kind"
        )


def _over(data: Bytes) -> torch.Tensor:
    return tensor_over(data, torch.uint8, data.shape)


def as_store(store: ByteStore | PullTransport | None, device: torch.device = CPU) -> ByteStore:
    """A store: what a transport offers, on a device if it knows it, or Ray's object store for None."""
    if store is None:
        return RayByteStore()
    found: Any = store
    return TransportByteStore(found, device) if isinstance(store, PullTransport) else found


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
