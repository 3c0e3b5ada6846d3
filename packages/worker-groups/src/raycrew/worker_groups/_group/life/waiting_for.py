"""Waiting for what another thread does, in a thread whose own work may be given up meanwhile."""

import asyncio
import logging
import time
from concurrent.futures import Future, wait
from typing import Any

from raycrew.cluster_core import Session

logger = logging.getLogger(__name__)

#: Between two looks at whether this thread's work is still wanted.
SLICE_S = 0.1


def is_done(future: "Future[Any]", timeout_s: float | None = None) -> bool:
    """Wait until something is done; whether it was in time.

    Raises:
        asyncio.CancelledError: What this thread does was given up.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not future.done():
        Session.check_wanted()
        left = SLICE_S if deadline is None else min(SLICE_S, deadline - time.monotonic())
        if left <= 0:
            return False
        wait([future], left)
    return True


def warn_in_loop(what: str) -> None:
    """Say that this is an event loop's thread, if it is: whatever waits here blocks it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    logger.warning("%s, and blocks the event loop; asyncio.to_thread(group.call, ...) does not", what)
