"""`raycrew groups`, `top` and `stacks`, also `python -m raycrew.worker_groups`: groups that run."""

import sys

from raycrew.worker_groups._health.command_line import groups, main, stacks, top

__all__ = ["groups", "main", "stacks", "top"]

if __name__ == "__main__":
    sys.exit(main())
