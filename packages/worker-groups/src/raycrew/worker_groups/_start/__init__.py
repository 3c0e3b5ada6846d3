"""Starting a group: what it is to be, all workers at once within one deadline, what took how long."""

from raycrew.worker_groups._start.announcing import renewal_record
from raycrew.worker_groups._start.arguments import (
    bundles_of,
    check_arguments,
    check_launchers,
    forwarded_now,
    init_kwargs_of,
    launcher_of,
)
from raycrew.worker_groups._start.copies import for_the_way, without_options
from raycrew.worker_groups._start.facts import GroupFacts
from raycrew.worker_groups._start.layout import JoinedClaim, Layout, Place
from raycrew.worker_groups._start.newcomers import (
    Standby,
    StandbyLostError,
    add_workers,
    next_generation,
    park,
    record_of_standby,
)
from raycrew.worker_groups._start.record import record_of, workers_of
from raycrew.worker_groups._start.report import StartupReport, Stopwatch
from raycrew.worker_groups._start.spec import (
    HOOK,
    EnvironmentOf,
    GroupOptions,
    GroupSpec,
    RayWorkerBuilder,
    check_methods,
    size_bytes,
    transport_of,
    worker_aliases,
)
from raycrew.worker_groups._start.startup import Handle, Started, start_group

__all__ = [
    "HOOK",
    "EnvironmentOf",
    "GroupFacts",
    "GroupOptions",
    "GroupSpec",
    "Handle",
    "JoinedClaim",
    "Layout",
    "Place",
    "RayWorkerBuilder",
    "Standby",
    "StandbyLostError",
    "Started",
    "StartupReport",
    "Stopwatch",
    "add_workers",
    "bundles_of",
    "check_arguments",
    "check_launchers",
    "check_methods",
    "for_the_way",
    "forwarded_now",
    "init_kwargs_of",
    "launcher_of",
    "next_generation",
    "park",
    "record_of",
    "record_of_standby",
    "renewal_record",
    "size_bytes",
    "start_group",
    "transport_of",
    "without_options",
    "worker_aliases",
    "workers_of",
]
