"""Calls of a group: who gets what, sent and awaited, and failures that say where."""

from raycrew.worker_groups._calls.closing import Closing
from raycrew.worker_groups._calls.dispatch import Dispatch, GroupShape, dispatch_single
from raycrew.worker_groups._calls.encoding import Packer
from raycrew.worker_groups._calls.ends import first_failure, when_done
from raycrew.worker_groups._calls.failures import (
    Whereabouts,
    culprits_first,
    failure,
    has_died,
    log_tail,
    parts_of,
    start_timeout,
    words,
)
from raycrew.worker_groups._calls.futures import MultiWorkerFuture, refuse_stream, wait_any
from raycrew.worker_groups._calls.group_calls import GroupCalls, unknown_attribute
from raycrew.worker_groups._calls.recovery import Recovery
from raycrew.worker_groups._calls.results import Results, in_thread
from raycrew.worker_groups._calls.sending import send_to_actors
from raycrew.worker_groups._calls.sizes import SharedStore
from raycrew.worker_groups._calls.waiting import Settled, deadline_after, left, settle

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
