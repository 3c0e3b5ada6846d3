"""What the members of one generation tell each other: who they are, what they wish, and why it ended."""

from raycrew.tensor_transport.process_groups._membership.board import BROKEN_KEY, GROUP_KEYS, TOKEN_KEY, Board
from raycrew.tensor_transport.process_groups._membership.cause import Cause, group_error
from raycrew.tensor_transport.process_groups._membership.invitation import (
    Backend,
    Invitation,
    check_backend,
    check_members,
    member_names,
    ranks_of,
)
from raycrew.tensor_transport.process_groups._membership.lifeline import Lifeline
from raycrew.tensor_transport.process_groups._membership.seat import Seat, choose_backend, choose_for
from raycrew.tensor_transport.process_groups._membership.watch import Watch

__all__ = [
    "BROKEN_KEY",
    "GROUP_KEYS",
    "TOKEN_KEY",
    "Backend",
    "Board",
    "Cause",
    "Invitation",
    "Lifeline",
    "Seat",
    "Watch",
    "check_backend",
    "check_members",
    "choose_backend",
    "choose_for",
    "group_error",
    "member_names",
    "ranks_of",
]
