"""What workers that stand by import: notes what it finds, and waits while there is a file that says so.

`PYTHON_GATE` counts as a variable of a process's start, so that it is there without a rank.
"""

import os
import time
from pathlib import Path

NAMES = ("RANK", "TOKEN", "COLOUR", "CUDA_VISIBLE_DEVICES", "SLURM_PROCID")
FOUND = {name: os.environ.get(name) for name in NAMES}
PID = os.getpid()

if gate := os.environ.get("PYTHON_GATE"):
    Path(gate, f"pid-{PID}").touch()
    while Path(gate, "closed").exists():
        time.sleep(0.01)
