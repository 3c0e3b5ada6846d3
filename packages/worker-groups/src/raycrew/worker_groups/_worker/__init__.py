"""What runs in a worker's process, and what is known of its class and options before it does."""

from raycrew.worker_groups._worker.forwarders import shell_class
from raycrew.worker_groups._worker.hearing import HOOK
from raycrew.worker_groups._worker.heart import Heart, Running, as_text, tick
from raycrew.worker_groups._worker.options import (
    Configured,
    WorkerOptions,
    check_env_vars,
    is_process_variable,
    merge_options,
    pick_secrets,
)
from raycrew.worker_groups._worker.raised import as_portable
from raycrew.worker_groups._worker.recalls import recall, recall_all
from raycrew.worker_groups._worker.shell import (
    CommunicationOptions,
    CurrentWorker,
    Gathered,
    Orders,
    as_current,
    be_current,
    current_worker,
)
from raycrew.worker_groups._worker.worker_class import (
    ClassInfo,
    ClassSource,
    MethodInfo,
    describe,
    describe_class,
    fqn_of,
    fqn_of_function,
    held_class,
    load_class,
    source_of,
)

__all__ = [
    "HOOK",
    "ClassInfo",
    "ClassSource",
    "CommunicationOptions",
    "Configured",
    "CurrentWorker",
    "Gathered",
    "Heart",
    "MethodInfo",
    "Orders",
    "Running",
    "WorkerOptions",
    "as_current",
    "as_portable",
    "as_text",
    "be_current",
    "check_env_vars",
    "current_worker",
    "describe",
    "describe_class",
    "fqn_of",
    "fqn_of_function",
    "held_class",
    "is_process_variable",
    "load_class",
    "merge_options",
    "pick_secrets",
    "recall",
    "recall_all",
    "shell_class",
    "source_of",
    "tick",
]
