"""Calls of a group: who gets what, sent and awaited, and failures that say where."""

from raycrew.worker_groups._calls.answers import (
    MultiWorkerFuture,
    Recovery,
    Results,
    Settled,
    Whereabouts,
    culprits_first,
    deadline_after,
    failure,
    first_failure,
    has_died,
    in_thread,
    left,
    log_tail,
    parts_of,
    refuse_stream,
    settle,
    start_timeout,
    wait_any,
    when_done,
    words,
)
from raycrew.worker_groups._calls.closing import Closing
from raycrew.worker_groups._calls.encoding import Packer
from raycrew.worker_groups._calls.methods import (
    Dispatch,
    GroupCalls,
    GroupShape,
    dispatch_single,
    method_name,
    unknown_attribute,
)
from raycrew.worker_groups._calls.sending import send_to_actors
from raycrew.worker_groups._calls.sizes import SharedStore

__all__ = [
    "Closing",
    "Dispatch",
    "GroupCalls",
    "GroupShape",
    "MultiWorkerFuture",
    "Packer",
    "Recovery",
    "Results",
    "Settled",
    "SharedStore",
    "Whereabouts",
    "culprits_first",
    "deadline_after",
    "dispatch_single",
    "failure",
    "first_failure",
    "has_died",
    "in_thread",
    "left",
    "log_tail",
    "method_name",
    "parts_of",
    "refuse_stream",
    "send_to_actors",
    "settle",
    "start_timeout",
    "unknown_attribute",
    "wait_any",
    "when_done",
    "words",
]
