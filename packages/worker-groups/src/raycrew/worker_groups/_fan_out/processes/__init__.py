"""A node's host, its fork server, and the processes in which items run: slots, journals, deadlines, ends."""

from raycrew.worker_groups._fan_out.processes.code import Code, Function, Kept, dumps
from raycrew.worker_groups._fan_out.processes.host import CONTROL, FanOutHost
from raycrew.worker_groups._fan_out.processes.journal import Finished, StrayMessageError, finished
from raycrew.worker_groups._fan_out.processes.supervision import BatchReport

__all__ = [
    "CONTROL",
    "BatchReport",
    "Code",
    "FanOutHost",
    "Finished",
    "Function",
    "Kept",
    "StrayMessageError",
    "dumps",
    "finished",
]
