"""Subcommands of `raycrew` that look at groups that run; also `python -m raycrew.worker_groups`."""

import sys

from raycrew.worker_groups._health.command_line import diagnose, groups, main, stacks, top

__all__ = ["diagnose", "groups", "main", "stacks", "top"]

if __name__ == "__main__":
    sys.exit(main())
