"""Groups as their owners have them: calls on one or all workers, their lives, and handles for others."""

from raycrew.worker_groups._group.base import WorkerGroup
from raycrew.worker_groups._group.beside import Beside
from raycrew.worker_groups._group.handles import GroupHandle, LocalRoute
from raycrew.worker_groups._group.on_ray import RayWorkerGroup

__all__ = ["Beside", "GroupHandle", "LocalRoute", "RayWorkerGroup", "WorkerGroup"]
