"""Process groups of our own, over several worker groups, beside whatever default group a process has."""

from raycrew.tensor_transport.process_groups._broadcasting import CollectiveGroup
from raycrew.tensor_transport.process_groups._forming import form_group
from raycrew.tensor_transport.process_groups._host import GroupHost
from raycrew.tensor_transport.process_groups._join import join_group
from raycrew.tensor_transport.process_groups._membership import Backend, Invitation, member_names

__all__ = [
    "Backend",
    "CollectiveGroup",
    "GroupHost",
    "Invitation",
    "form_group",
    "join_group",
    "member_names",
]
