"""`raycrew groups`, `top` and `stacks`: what is asked for, what each finds, and how that is said."""

from raycrew.worker_groups._health.command_line.commands import report
from raycrew.worker_groups._health.command_line.parsing import groups, main, stacks, top

__all__ = ["groups", "main", "report", "stacks", "top"]
