"""What ends a run in which a round never ends, and all that it has left."""

import faulthandler
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from chaos.faults import Fault
from chaos.journal import Journal, Outcome
from chaos.leaks import run_processes
from chaos.report import BROKEN
from chaos.strike import MissedError, kill


@contextmanager
def watched(
    fault: Fault, journal: Journal, run: str, limit_s: float, folders: Sequence[Path] = ()
) -> Iterator[None]:
    """End this process and all of its run, with a note of it, should a block never end.

    Args:
        fault: Which fault is injected in the block.
        journal: Where it is noted that it hung.
        run: What marks the processes of the run.
        limit_s: The longest that the block may take.
        folders: What to remove then.
    """

    def give_up() -> None:
        faulthandler.dump_traceback(sys.stderr)
        journal.add(Outcome(fault.number, fault.kind, fault.moment, "hung", stall_s=limit_s))
        _end_others(run)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(BROKEN)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_others(run: str, timeout_s: float = 10.0) -> None:
    """Kill all processes of a run but this one, those that are started meanwhile too."""
    deadline = time.monotonic() + timeout_s
    while (others := run_processes(run).keys() - {os.getpid()}) and time.monotonic() < deadline:
        for pid in others:
            with suppress(MissedError):
                kill(pid)
        time.sleep(0.05)
