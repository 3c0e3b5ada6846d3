"""A queue's state: ledger and rows together, one operation at a time, and who may have room."""

from raycrew.worker_groups.rollouts.samples._keeping.keeper import Keeper
from raycrew.worker_groups.rollouts.samples._keeping.room import PLACE_S
from raycrew.worker_groups.rollouts.samples._keeping.tally import TALLIED, SampleStats

__all__ = ["PLACE_S", "TALLIED", "Keeper", "SampleStats"]
