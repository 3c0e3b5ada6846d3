"""`raycrew groups`, `top`, `stacks` and `diagnose`: what each is asked, finds and says."""

from raycrew.worker_groups._health.command_line.commands import report
from raycrew.worker_groups._health.command_line.parsing import diagnose, groups, main, stacks, top

__all__ = ["diagnose", "groups", "main", "report", "stacks", "top"]
