"""`raycrew-env`, also `raycrew env`: environments from the command line."""

import sys

from raycrew.venv_manager._command_line import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
