"""Groups as their owners have them: calls on one or all workers, their lives, and handles for others."""

from raycrew.worker_groups._group.base import WorkerGroup
from raycrew.worker_groups._group.beside import Beside
from raycrew.worker_groups._group.handles import GroupHandle, LocalRoute
from raycrew.worker_groups._group.life import RestartBudget, claim_more
from raycrew.worker_groups._group.on_ray import RayWorkerGroup
from raycrew.worker_groups._group.phases import HighWater, PhaseManager, PhaseReport, PhaseTurn, PhaseUse
from raycrew.worker_groups._group.reserve import Spare
from raycrew.worker_groups._group.resizing import Resized

__all__ = [
    "Beside",
    "GroupHandle",
    "HighWater",
    "LocalRoute",
    "PhaseManager",
    "PhaseReport",
    "PhaseTurn",
    "PhaseUse",
    "RayWorkerGroup",
    "Resized",
    "RestartBudget",
    "Spare",
    "WorkerGroup",
    "claim_more",
]
