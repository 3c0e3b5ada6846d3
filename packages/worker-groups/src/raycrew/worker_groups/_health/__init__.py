"""What is seen of workers and their calls: how they are and when they have ended, here and from elsewhere."""

from raycrew.worker_groups._health.ending import Ended, end_workers, end_workers_of
from raycrew.worker_groups._health.group_health import GroupHealth, SeenByRank, Workers, last_seen, sights_of
from raycrew.worker_groups._health.observers import LOOK_WITHIN_S, Observer, Span, look_before_end, observed
from raycrew.worker_groups._health.questions import (
    Answer,
    UnansweredError,
    ask,
    ask_timed,
    ask_within,
    by_node,
    follow,
)
from raycrew.worker_groups._health.reports import (
    MISSED_S,
    RankState,
    ResourceUsage,
    RunningCall,
    Seen,
    StuckWorker,
    WorkerStatus,
)
from raycrew.worker_groups._health.roster import (
    Found,
    GroupRecord,
    GroupSight,
    Publication,
    RankSight,
    UnknownGroupError,
    WorkerRecord,
    look,
    take_stacks,
)
from raycrew.worker_groups._health.watches import WATCH, stand_by, watch_owner

__all__ = [
    "LOOK_WITHIN_S",
    "MISSED_S",
    "WATCH",
    "Answer",
    "Ended",
    "Found",
    "GroupHealth",
    "GroupRecord",
    "GroupSight",
    "Observer",
    "Publication",
    "RankSight",
    "RankState",
    "ResourceUsage",
    "RunningCall",
    "Seen",
    "SeenByRank",
    "Span",
    "StuckWorker",
    "UnansweredError",
    "UnknownGroupError",
    "WorkerRecord",
    "WorkerStatus",
    "Workers",
    "ask",
    "ask_timed",
    "ask_within",
    "by_node",
    "end_workers",
    "end_workers_of",
    "follow",
    "last_seen",
    "look",
    "look_before_end",
    "observed",
    "sights_of",
    "stand_by",
    "take_stacks",
    "watch_owner",
]
