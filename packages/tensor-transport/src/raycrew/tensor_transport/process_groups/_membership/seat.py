"""What each member says of itself when it arrives."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from raycrew.tensor_transport.process_groups._membership.invitation import Backend
from raycrew.tensor_transport.process_groups._process import Endpoint
from raycrew.tensor_transport.transports import Choice, MemberFacts, Owner, choose_transport


@dataclass(frozen=True, slots=True)
class Seat:
    """One member that has arrived.

    Attributes:
        member: Its name.
        lifeline: Where to ask whether its process is still there.
        facts: What decides what it can use.
    """

    member: str
    lifeline: Endpoint
    facts: MemberFacts

    def encode(self) -> str:
        """As text: what comes from a store is never unpickled."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Back from `encode`."""
        found = json.loads(text)
        facts = found["facts"]
        facts |= {"owner": Owner(**facts["owner"]), "gpus": tuple(facts["gpus"])}
        address, port = found["lifeline"]
        return cls(found["member"], (address, port), MemberFacts(**facts))

    def __str__(self) -> str:
        return f"{self.member} (process {self.facts.owner.pid} on {self.facts.host})"


def choose_backend(wanted: Backend, seats: Sequence[Seat]) -> Choice:
    """What all members use: the same on each of them, because it is made from what all said.

    Raises:
        NoTransportError: Not every member can use what was asked for.
    """
    return choose_for(wanted, [seat.facts for seat in seats])


def choose_for(wanted: Backend, facts: Sequence[MemberFacts]) -> Choice:
    """The same, from the facts of all members."""
    if wanted == "gloo":
        return choose_transport(facts, "broadcast", "gloo", device="cpu")
    names = ("nccl", "gloo") if wanted == "auto" else (wanted,)
    return choose_transport(facts, "broadcast", names, device="cuda")
