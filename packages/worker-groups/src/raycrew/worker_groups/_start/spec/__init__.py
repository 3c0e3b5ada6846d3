"""What a group is to be: its options, checked where they are made."""

from raycrew.worker_groups._start.spec.options import GroupOptions, kind_of
from raycrew.worker_groups._start.spec.plugins import EnvironmentOf, interpreter_for, transport_of
from raycrew.worker_groups._start.spec.sizes import size_bytes
from raycrew.worker_groups._start.spec.spec import (
    GroupSpec,
    RayWorkerBuilder,
    check_init,
    check_methods,
    worker_aliases,
)
from raycrew.worker_groups._worker import HOOK

__all__ = [
    "HOOK",
    "EnvironmentOf",
    "GroupOptions",
    "GroupSpec",
    "RayWorkerBuilder",
    "check_init",
    "check_methods",
    "interpreter_for",
    "kind_of",
    "size_bytes",
    "transport_of",
    "worker_aliases",
]
