"""Groups that have the same devices in turns: at most one is awake, and what that takes is measured."""

from raycrew.worker_groups._group.phases.manager import PhaseManager
from raycrew.worker_groups._group.phases.marks import HighWater, PhaseReport, PhaseUse
from raycrew.worker_groups._group.phases.turn import PhaseTurn

__all__ = ["HighWater", "PhaseManager", "PhaseReport", "PhaseTurn", "PhaseUse"]
