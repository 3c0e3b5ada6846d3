"""Calling a group from anywhere in the cluster: a handle without power over it, and who its members are."""

from raycrew.worker_groups._group.handles.directory import Directory
from raycrew.worker_groups._group.handles.handle import GroupHandle
from raycrew.worker_groups._group.handles.members import Members
from raycrew.worker_groups._group.handles.routes import Contact, LocalRoute, RayRoute

__all__ = ["Contact", "Directory", "GroupHandle", "LocalRoute", "Members", "RayRoute"]
