"""Groups as others on the cluster see them: their records, and what is seen of their ranks."""

from raycrew.worker_groups._health.roster.looking import (
    Found,
    UnknownGroupError,
    examine_groups,
    look,
    take_stacks,
)
from raycrew.worker_groups._health.roster.publishing import Publication
from raycrew.worker_groups._health.roster.records import GroupRecord, StartRecord, WorkerRecord
from raycrew.worker_groups._health.roster.sights import GroupSight, RankSight

__all__ = [
    "Found",
    "GroupRecord",
    "GroupSight",
    "Publication",
    "RankSight",
    "StartRecord",
    "UnknownGroupError",
    "WorkerRecord",
    "examine_groups",
    "look",
    "take_stacks",
]
