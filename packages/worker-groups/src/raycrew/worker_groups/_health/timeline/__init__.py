"""What a run did when: recorded while somebody wants to know, drawn as a trace and a page."""

from raycrew.worker_groups._health.timeline.drawing import GroupShares, SlowestRank, TimelineStatistics
from raycrew.worker_groups._health.timeline.metrics import RayMetrics
from raycrew.worker_groups._health.timeline.recording import TimedPhase, TimedReport, Timeline, timeline

__all__ = [
    "GroupShares",
    "RayMetrics",
    "SlowestRank",
    "TimedPhase",
    "TimedReport",
    "Timeline",
    "TimelineStatistics",
    "timeline",
]
