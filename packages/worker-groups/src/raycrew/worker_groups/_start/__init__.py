"""Starting a group: what it is to be, all workers at once within one deadline, what took how long."""

from raycrew.worker_groups._start.plugins import transport_of
from raycrew.worker_groups._start.report import StartupReport, Stopwatch
from raycrew.worker_groups._start.spec import GroupSpec, RayWorkerBuilder, check_init, worker_aliases
from raycrew.worker_groups._start.startup import Handle, Started, restart_workers, start_group

__all__ = [
    "GroupSpec",
    "Handle",
    "RayWorkerBuilder",
    "Started",
    "StartupReport",
    "Stopwatch",
    "check_init",
    "restart_workers",
    "start_group",
    "transport_of",
    "worker_aliases",
]
