"""What is seen of workers and their calls: how they are and when they have ended, here and from elsewhere."""

from raycrew.worker_groups._health.diagnosis import (
    Diagnosis,
    Findings,
    GroupDiagnosis,
    RankDiagnosis,
    Subjects,
    Wanted,
    check_folder,
    examine,
    tell_of_start,
)
from raycrew.worker_groups._health.ending import Ended, end_workers, end_workers_of
from raycrew.worker_groups._health.group_health import GroupHealth, SeenByRank, Workers, last_seen, sights_of
from raycrew.worker_groups._health.observers import Observer, Span, look_before_end, observed
from raycrew.worker_groups._health.questions import (
    UnansweredError,
    follow,
)
from raycrew.worker_groups._health.reports import (
    LONGEST_S,
    ResourceUsage,
    RunningCall,
    Seen,
    StuckWorker,
    WorkerStatus,
    checked_patience,
    checked_time,
    why_stuck,
)
from raycrew.worker_groups._health.roster import (
    GroupRecord,
    Publication,
    StartRecord,
    WorkerRecord,
    look,
    take_stacks,
)
from raycrew.worker_groups._health.watches import stand_by, watch_owner

__all__ = [
    "LONGEST_S",
    "Diagnosis",
    "Ended",
    "Findings",
    "GroupDiagnosis",
    "GroupHealth",
    "GroupRecord",
    "Observer",
    "Publication",
    "RankDiagnosis",
    "ResourceUsage",
    "RunningCall",
    "Seen",
    "SeenByRank",
    "Span",
    "StartRecord",
    "StuckWorker",
    "Subjects",
    "UnansweredError",
    "Wanted",
    "WorkerRecord",
    "WorkerStatus",
    "Workers",
    "check_folder",
    "checked_patience",
    "checked_time",
    "end_workers",
    "end_workers_of",
    "examine",
    "follow",
    "last_seen",
    "look",
    "look_before_end",
    "observed",
    "sights_of",
    "stand_by",
    "take_stacks",
    "tell_of_start",
    "watch_owner",
    "why_stuck",
]
