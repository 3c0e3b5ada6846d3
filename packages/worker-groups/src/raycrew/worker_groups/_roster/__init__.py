"""Groups as others on the cluster see them: their records, and what is seen of their ranks."""

from raycrew.worker_groups._roster.looking import look, take_stacks
from raycrew.worker_groups._roster.publishing import Publication
from raycrew.worker_groups._roster.records import GroupRecord, WorkerRecord
from raycrew.worker_groups._roster.sights import GroupSight, RankSight, Stacks

__all__ = [
    "GroupRecord",
    "GroupSight",
    "Publication",
    "RankSight",
    "Stacks",
    "WorkerRecord",
    "look",
    "take_stacks",
]
