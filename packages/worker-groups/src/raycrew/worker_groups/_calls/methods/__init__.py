"""A group's methods as they are called, and which rank gets what."""

from raycrew.worker_groups._calls.methods.dispatch import Dispatch, GroupShape, dispatch_single
from raycrew.worker_groups._calls.methods.group_calls import GroupCalls, unknown_attribute

__all__ = [
    "Dispatch",
    "GroupCalls",
    "GroupShape",
    "dispatch_single",
    "unknown_attribute",
]
