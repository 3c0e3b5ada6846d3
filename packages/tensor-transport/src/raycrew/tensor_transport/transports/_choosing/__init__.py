"""Which transport a group uses, from what its members say of themselves."""

from raycrew.tensor_transport.transports._choosing.choice import Candidate, Choice, choose_transport
from raycrew.tensor_transport.transports._choosing.facts import (
    MemberFacts,
    boot_id,
    member_facts,
    start_of,
    this_process,
)
from raycrew.tensor_transport.transports._choosing.reasons import WHY_NOT, no_process_vm

__all__ = [
    "WHY_NOT",
    "Candidate",
    "Choice",
    "MemberFacts",
    "boot_id",
    "choose_transport",
    "member_facts",
    "no_process_vm",
    "start_of",
    "this_process",
]
