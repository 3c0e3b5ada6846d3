"""What could not be given back when its time came: kept from being forgotten, and tried again on demand."""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from raycrew.worker_groups._group.life.waiting_for import is_done
from raycrew.worker_groups._ray import PerProcess

logger = logging.getLogger(__name__)

_kept: list[Callable[[], bool]] = []
_lock = PerProcess(threading.Lock)
os.register_at_fork(after_in_child=_kept.clear)  # A forked process leaves alone what is its parent's.


def keep(give_back: Callable[[], bool]) -> None:
    """Keep something until it can be given back.

    Args:
        give_back: Tries to, within bounded time; says whether it is done with.
    """
    with _lock.here:
        _kept.append(give_back)


def try_again(timeout_s: float) -> None:
    """Try to give back all that is kept, all of it at once.

    Args:
        timeout_s: How long that is waited for; what takes longer goes on, and is kept again if it is in vain.
    """
    deadline, tries = time.monotonic() + timeout_s, list[Future[None]]()
    with _lock.here:
        mine, _kept[:] = list(_kept), []
    try:
        while mine:
            over = Future[None]()
            threading.Thread(target=_try, args=(mine[-1], over), name="raycrew-kept", daemon=True).start()
            tries.append(over)
            mine.pop()
    finally:
        with _lock.here:
            _kept.extend(mine)
    for over in tries:
        is_done(over, max(0.0, deadline - time.monotonic()))


def _try(give_back: Callable[[], bool], over: "Future[None]") -> None:
    is_free = False
    try:
        is_free = give_back()
    except Exception:
        logger.exception("what is kept could not be given back")
    finally:
        if not is_free:
            keep(give_back)
        over.set_result(None)
