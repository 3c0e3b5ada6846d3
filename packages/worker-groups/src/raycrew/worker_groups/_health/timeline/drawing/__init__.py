"""What becomes of a timeline: a trace, a page, and what both come to."""

from raycrew.worker_groups._health.timeline.drawing.chrome import trace_of
from raycrew.worker_groups._health.timeline.drawing.page import page_of
from raycrew.worker_groups._health.timeline.drawing.statistics import (
    GroupShares,
    SlowestRank,
    TimelineStatistics,
    statistics_of,
)

__all__ = ["GroupShares", "SlowestRank", "TimelineStatistics", "page_of", "statistics_of", "trace_of"]
