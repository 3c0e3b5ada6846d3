"""What comes back of a call: awaited, gathered, sent again, or a failure that says where."""

from raycrew.worker_groups._calls.answers.ends import first_failure, when_done
from raycrew.worker_groups._calls.answers.failures import (
    Whereabouts,
    described,
    failure,
    failures_of,
    has_died,
    log_tail,
    parts_of,
    start_timeout,
    words,
)
from raycrew.worker_groups._calls.answers.futures import (
    MultiWorkerFuture,
    refuse_as_items,
    refuse_stream,
    wait_any,
)
from raycrew.worker_groups._calls.answers.recovery import Recovery
from raycrew.worker_groups._calls.answers.results import Results, in_thread, uninterrupted
from raycrew.worker_groups._calls.answers.waiting import (
    Settled,
    deadline_after,
    left,
    settle,
)

__all__ = [
    "MultiWorkerFuture",
    "Recovery",
    "Results",
    "Settled",
    "Whereabouts",
    "deadline_after",
    "described",
    "failure",
    "failures_of",
    "first_failure",
    "has_died",
    "in_thread",
    "left",
    "log_tail",
    "parts_of",
    "refuse_as_items",
    "refuse_stream",
    "settle",
    "start_timeout",
    "uninterrupted",
    "wait_any",
    "when_done",
    "words",
]
