"""`python -m raycrew.cluster_core`."""

import sys

from raycrew.cluster_core._commands import main

if __name__ == "__main__":
    sys.exit(main())
