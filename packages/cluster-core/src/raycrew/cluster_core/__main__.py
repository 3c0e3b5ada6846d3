"""`raycrew`, also `python -m raycrew.cluster_core`: clusters from the command line."""

import sys

from raycrew.cluster_core._command_line import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
