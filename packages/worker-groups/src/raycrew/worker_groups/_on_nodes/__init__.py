"""What runs on a node to watch its workers: standard library only, so that it can be sent there by value."""

from raycrew.worker_groups._on_nodes.leavings import RECORDS, output_paths, read_tail
from raycrew.worker_groups._on_nodes.lookout import Lookout
from raycrew.worker_groups._on_nodes.marks import mark_own_process, marked, marks_of
from raycrew.worker_groups._on_nodes.page import (
    BEAT,
    BEAT_S,
    BEGAN,
    DEVICE,
    ENDED,
    FIRST_SLOT,
    METHOD,
    METHOD_BYTES,
    NUMBER,
    RING_AT,
    SIZE,
    SLOT_WORDS,
    SLOTS,
    TICK,
    TICKED,
    UNKNOWN,
    make_page,
)
from raycrew.worker_groups._on_nodes.process_table import (
    Process,
    clock_name,
    kill,
    own_process,
    pid_namespace,
    process_of,
    read_table,
    runs,
)
from raycrew.worker_groups._on_nodes.ring import Ring, notes_in
from raycrew.worker_groups._on_nodes.sight import on_page
from raycrew.worker_groups._on_nodes.stacks import offer_stacks

__all__ = [
    "BEAT",
    "BEAT_S",
    "BEGAN",
    "DEVICE",
    "ENDED",
    "FIRST_SLOT",
    "METHOD",
    "METHOD_BYTES",
    "NUMBER",
    "RECORDS",
    "RING_AT",
    "SIZE",
    "SLOTS",
    "SLOT_WORDS",
    "TICK",
    "TICKED",
    "UNKNOWN",
    "Lookout",
    "Process",
    "Ring",
    "clock_name",
    "kill",
    "make_page",
    "mark_own_process",
    "marked",
    "marks_of",
    "notes_in",
    "offer_stacks",
    "on_page",
    "output_paths",
    "own_process",
    "pid_namespace",
    "process_of",
    "read_table",
    "read_tail",
    "runs",
]
