"""What ways to move bytes have in common: two narrow interfaces, and the values that they exchange."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch

from raycrew.tensor_transport._bytes import ByFields
from raycrew.tensor_transport.protocols import Bytes
from raycrew.tensor_transport.transports._interface.transfer import Transfer

Buffer: TypeAlias = Bytes | torch.Tensor
"""Memory of a caller: a 1-D array of uint8, or a contiguous tensor of any dtype."""

Reach = Literal["process", "node", "cluster"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a way to move bytes can do, as data.

    Attributes:
        reach: How far apart the two ends may be: in one process, on one node, anywhere in the cluster.
        devices: Where the bytes, and the buffers that they are moved into, may be.
        maps: Whether a reader on the same machine can have the bytes in place, without a copy.
        one_sided: Whether bytes move without any code of the owner being run.
        keeps_copy: Whether `offer` takes a copy, so that the source may be written to as soon as it returns;
            else the source is lent, and stays as it is until the offer is withdrawn.
        survives_owner: Whether bytes can be had after the process that offered them died.
    """

    reach: Reach
    devices: tuple[str, ...] = ("cpu",)
    maps: bool = False
    one_sided: bool = False
    keeps_copy: bool = False
    survives_owner: bool = False


@dataclass(frozen=True, slots=True)
class Owner(ByFields):
    """A process, so that neither a reused pid nor another machine or container is taken for it.

    Attributes:
        machine: The boot of the machine, by its id.
        pid_namespace: Where `pid` means this process: containers number theirs on their own.
        pid: The process.
        started: When it was started, in clock ticks since the boot.
        node_id: Ray's node, "" without Ray.
    """

    machine: str
    pid_namespace: str
    pid: int
    started: int
    node_id: str = ""

    def __str__(self) -> str:
        on = f" on node {self.node_id}" if self.node_id else ""
        return f"process {self.pid}{on} of machine {self.machine:.13}"


@dataclass(frozen=True, slots=True)
class Offer(ByFields):
    """Bytes that others may pull; small and picklable.

    Attributes:
        transport: Name of the transport that has them.
        owner: The process that offered them.
        key: Whatever the transport needs to find them.
        size_bytes: How many they are.
        fold: Their fold, if the owner took one: whoever pulls all of them compares it.
    """

    transport: str
    owner: Owner
    key: Any = field(repr=False)
    size_bytes: int = 0
    fold: int | None = None

    @property
    def whole(self) -> "Region":
        """All of it."""
        return Region(self, 0, self.size_bytes)


@dataclass(frozen=True, slots=True)
class Region:
    """A run of the bytes of an offer."""

    offer: Offer
    offset: int
    size_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether these are all bytes of the offer."""
        return self.offset == 0 and self.size_bytes == self.offer.size_bytes


@runtime_checkable
class Transport(Protocol):
    """What all transports say about themselves. Made in each process; never pickled."""

    @property
    def name(self) -> str:
        """What offers and choices call it."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    def available(self) -> str | None:
        """Why it can't be used in this process; None where it can. Nothing heavy is imported."""
        ...

    def close(self) -> None:
        """End what is under way, and give up what is held: offers, threads, sockets, files. Idempotent."""
        ...


@runtime_checkable
class PullTransport(Transport, Protocol):
    """Bytes are offered by one process, and others copy regions of them into buffers of their own."""

    def offer(self, data: Buffer, *, folded: bool = False) -> Offer:
        """Have bytes ready for others; see `Capabilities.keeps_copy` about writing to them afterwards.

        A tensor that is not contiguous, or on a device that the transport does not know, is copied. With
        `folded` their fold goes along, and is compared wherever all of them are pulled.

        Raises:
            UnsupportedTensorError: A tensor has no plain bytes.
            TransportError: There is no room, or the transport is not available here.
            TransportClosedError: It is closed.
        """
        ...

    def pull(
        self, regions: Sequence[Region], into: Sequence[Buffer], *, timeout_s: float | None = None
    ) -> Transfer:
        """Copy each region into the buffer at its place; the returned transfer ends when all are there.

        Nothing is written any more once the transfer has ended, whether it succeeded, failed, was cancelled
        or ran out of time. The buffers of a transfer that did not succeed hold anything. Tensors count it as
        a write, as torch's own operations do.

        The transfer fails with:
            StaleHandleError: An offer was withdrawn.
            ShardLostError: An owner died or cannot be reached.
            DamagedBytesError: The fold of an offer differs from what arrived.
            TransportTimeoutError: It did not end within `timeout_s`.

        Raises:
            ValueError: At once: numbers differ, a buffer has another size than its region, is read-only or
                not contiguous, or a region is not within its offer, which is another transport's.
            TransportClosedError: The transport is closed.
        """
        ...

    def map(self, offer: Offer, *, timeout_s: float | None = None) -> Bytes:
        """The bytes in place, read-only, for as long as the array or a view of it lives.

        Raises:
            TransportError: The transport does not map (`capabilities.maps`).
            StaleHandleError: The offer was withdrawn.
            ShardLostError: The owner died, or is on another machine.
            TransportTimeoutError: They could not be had within `timeout_s`.
        """
        ...

    def withdraw(self, offers: Sequence[Offer]) -> None:
        """Give bytes up that this process offered. Idempotent; does not wait for readers.

        Whoever pulls them later, or at this moment, gets an error or the bytes as they were offered.
        """
        ...


@runtime_checkable
class ReservingTransport(PullTransport, Protocol):
    """One that can offer what is written into memory of its own, which spares the copy of `offer`."""

    def reserve(self, size_bytes: int) -> tuple[Offer, Bytes]:
        """Memory that holds anything, and what offers it: nobody is told of it before it is written whole.

        Raises:
            TransportError: There is no room, or the transport is not available here.
            TransportClosedError: It is closed.
        """
        ...


@runtime_checkable
class BroadcastTransport(Transport, Protocol):
    """The same bytes from one member of a group to all others, which take part all at once.

    Buffers go one after another, in the same order and sizes on all members, at most `window_bytes` of them
    under way at any time. What a failed transfer leaves in the buffers may be anything; nothing is written
    to them once it has ended.
    """

    def send(
        self, buffers: Sequence[Buffer], *, window_bytes: int | None = None, timeout_s: float | None = None
    ) -> Transfer:
        """Send from this member to all others.

        The transfer fails with:
            ShardLostError: A member died or left.
            TransportTimeoutError: It did not end within `timeout_s`; the message names the ranks that did not
                take part, where they are known.
        """
        ...

    def receive(
        self, into: Sequence[Buffer], *, window_bytes: int | None = None, timeout_s: float | None = None
    ) -> Transfer:
        """Take what another member sends; fails as `send` does, and with ValueError where sizes differ."""
        ...
