"""Whether workers live, how they are, and when they have ended, by the process tables of their nodes."""

from raycrew.worker_groups._health.ending import Ended, end_workers, end_workers_of
from raycrew.worker_groups._health.group_health import GroupHealth, SeenByRank, Workers, last_seen, sights_of
from raycrew.worker_groups._health.reports import (
    MISSED_S,
    ResourceUsage,
    RunningCall,
    Seen,
    StuckWorker,
    WorkerStatus,
)
from raycrew.worker_groups._health.watches import (
    WATCH,
    UnansweredError,
    ask_within,
    by_node,
    follow,
    stand_by,
    watch_owner,
)

__all__ = [
    "MISSED_S",
    "WATCH",
    "Ended",
    "GroupHealth",
    "ResourceUsage",
    "RunningCall",
    "Seen",
    "SeenByRank",
    "StuckWorker",
    "UnansweredError",
    "WorkerStatus",
    "Workers",
    "ask_within",
    "by_node",
    "end_workers",
    "end_workers_of",
    "follow",
    "last_seen",
    "sights_of",
    "stand_by",
    "watch_owner",
]
