"""Starting a group: what it is to be, all workers at once within one deadline, what took how long."""

from raycrew.worker_groups._start.copies import for_the_way
from raycrew.worker_groups._start.facts import GroupFacts
from raycrew.worker_groups._start.options import GroupOptions
from raycrew.worker_groups._start.plugins import transport_of
from raycrew.worker_groups._start.report import StartupReport, Stopwatch
from raycrew.worker_groups._start.spec import GroupSpec, RayWorkerBuilder, check_init, worker_aliases
from raycrew.worker_groups._start.startup import Handle, Started, restart_workers, start_group

__all__ = [
    "GroupFacts",
    "GroupOptions",
    "GroupSpec",
    "Handle",
    "RayWorkerBuilder",
    "Started",
    "StartupReport",
    "Stopwatch",
    "check_init",
    "for_the_way",
    "restart_workers",
    "start_group",
    "transport_of",
    "worker_aliases",
]
