"""Whether workers live and when they have ended, by the process tables of their nodes."""

from raycrew.worker_groups._health.ending import Ended, end_workers, end_workers_of
from raycrew.worker_groups._health.marks import mark_own_process
from raycrew.worker_groups._health.process_table import own_process, pid_namespace
from raycrew.worker_groups._health.watches import follow, stand_by

__all__ = [
    "Ended",
    "end_workers",
    "end_workers_of",
    "follow",
    "mark_own_process",
    "own_process",
    "pid_namespace",
    "stand_by",
]
