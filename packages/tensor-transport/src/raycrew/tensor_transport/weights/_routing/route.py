"""What the driver and the processes of a route say to each other: small, picklable values."""

from dataclasses import dataclass
from typing import Any, Literal

from raycrew.tensor_transport.process_groups import Invitation
from raycrew.tensor_transport.transports import MemberFacts

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Route:
    """What one process is told: the same transport as all others, and its places in groups.

    Attributes:
        key: What tells this route from those before.
        transport: What moves the buckets of an update.
        kept_in: What keeps them for those who come late; the transport itself unless that is a collective.
        explanation: Why it was chosen; the same text in all processes.
        invitations: One for a publisher: the group in which it sends to all receivers. One for each
            publisher, in the same order everywhere, for a receiver.
        number: Which of a receiver's groups a publisher's is.
        timeout_s: Deadline for all to join.
        device: Where the bytes are on both sides: "cpu", or "cuda" for that of each process.
    """

    key: str
    transport: str
    kept_in: str
    explanation: str
    invitations: tuple[Invitation, ...] = ()
    number: int = 0
    timeout_s: float = 60.0
    device: Device = "cpu"


@dataclass(frozen=True, slots=True)
class Place:
    """What one process says of itself.

    Attributes:
        facts: What decides what it can use.
        key: The route that it has joined, and that works; "" where there is none.
    """

    facts: MemberFacts
    key: str


@dataclass(frozen=True, slots=True)
class Ticket:
    """A bucket: where it is kept, and as which one of its group it is broadcast.

    Attributes:
        kept_in: The transport that keeps it.
        kept: What finds it there.
        size_bytes: How many bytes it has.
        key: The route over which it is broadcast; "" where it is not.
        group: Which of a receiver's groups that is.
        turn: The how many-th bucket of the group it is, counted from 1.
    """

    kept_in: str
    kept: Any
    size_bytes: int
    key: str = ""
    group: int = 0
    turn: int = 0

    @property
    def manifest(self) -> str:
        """What all members of the group compare before a byte moves."""
        return f"bucket {self.turn} of route {self.key}"
