"""What each member says of itself when it arrives."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from raycrew.tensor_transport.process_groups._membership.invitation import Backend
from raycrew.tensor_transport.process_groups._membership.lifeline import is_gone
from raycrew.tensor_transport.process_groups._process import Endpoint
from raycrew.tensor_transport.transports import (
    Choice,
    MemberFacts,
    Owner,
    choose_transport,
    start_of,
    this_process,
)


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

    def is_gone(self) -> bool:
        """Whether its process is known to be gone, though somebody else may have the port of its lifeline."""
        here, owner = this_process(), self.facts.owner
        near = (owner.machine, owner.pid_namespace, self.facts.uid)
        if near == (here.machine, here.pid_namespace, os.geteuid()) and start_of(owner.pid) != owner.started:
            return True
        return is_gone(self.lifeline)

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
