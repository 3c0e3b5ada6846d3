"""A small GRPO run on raycrew: `python examples/grpo/run.py --help`."""

import sys

from grpo.main import main

if __name__ == "__main__":
    sys.exit(main())
