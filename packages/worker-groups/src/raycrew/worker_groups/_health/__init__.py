"""Whether workers live, how they are, and when they have ended, by the process tables of their nodes."""

from raycrew.worker_groups._health.ending import Ended, end_workers, end_workers_of
from raycrew.worker_groups._health.group_health import GroupHealth, SeenByRank, Workers, last_seen, sights_of
from raycrew.worker_groups._health.heart import Heart, Running, as_text, start_heart, tick
from raycrew.worker_groups._health.on_nodes import (
    METHOD_BYTES,
    mark_own_process,
    on_page,
    own_process,
    pid_namespace,
)
from raycrew.worker_groups._health.reports import (
    ResourceUsage,
    RunningCall,
    Seen,
    StuckWorker,
    WorkerStatus,
)
from raycrew.worker_groups._health.watches import follow, stand_by

__all__ = [
    "METHOD_BYTES",
    "Ended",
    "GroupHealth",
    "Heart",
    "ResourceUsage",
    "Running",
    "RunningCall",
    "Seen",
    "SeenByRank",
    "StuckWorker",
    "WorkerStatus",
    "Workers",
    "as_text",
    "end_workers",
    "end_workers_of",
    "follow",
    "last_seen",
    "mark_own_process",
    "on_page",
    "own_process",
    "pid_namespace",
    "sights_of",
    "stand_by",
    "start_heart",
    "tick",
]
