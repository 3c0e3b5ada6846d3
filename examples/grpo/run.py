"""A small GRPO run on raycrew: `python examples/grpo/run.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "generation"))  # the library of generators

from raycrew.worker_groups import heavy_imports

with heavy_imports():
    from grpo.main import main

if __name__ == "__main__":
    sys.exit(main())
