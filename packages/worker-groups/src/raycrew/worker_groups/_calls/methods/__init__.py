"""A group's methods as they are called, and which rank gets what."""

from raycrew.worker_groups._calls.methods.dispatch import dispatch_single
from raycrew.worker_groups._calls.methods.group_calls import GroupCalls, unknown_attribute
from raycrew.worker_groups._calls.methods.shape import Dispatch, GroupShape
from raycrew.worker_groups._calls.methods.typed import method_name

__all__ = [
    "Dispatch",
    "GroupCalls",
    "GroupShape",
    "dispatch_single",
    "method_name",
    "unknown_attribute",
]
