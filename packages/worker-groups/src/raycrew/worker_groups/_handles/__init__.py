"""Calling a group from anywhere in the cluster: a handle without power over it, and who its members are."""

from raycrew.worker_groups._handles.directory import Directory
from raycrew.worker_groups._handles.handle import GroupHandle
from raycrew.worker_groups._handles.members import Members
from raycrew.worker_groups._handles.routes import Contact, LocalRoute, RayRoute

__all__ = ["Contact", "Directory", "GroupHandle", "LocalRoute", "Members", "RayRoute"]
