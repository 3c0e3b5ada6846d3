"""What could not be given back when its time came: kept from being forgotten, and tried again on demand."""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_kept: list[Callable[[], bool]] = []
_lock = threading.Lock()


def keep(give_back: Callable[[], bool]) -> None:
    """Keep something until it can be given back.

    Args:
        give_back: Tries to, within bounded time; says whether it is done with.
    """
    with _lock:
        _kept.append(give_back)


def try_again(timeout_s: float) -> None:
    """Try to give back all that is kept, all of it at once.

    Args:
        timeout_s: How long that is waited for; what takes longer goes on, and is kept again if it is in vain.
    """
    deadline, tries = time.monotonic() + timeout_s, list[threading.Thread]()
    with _lock:
        mine, _kept[:] = list(_kept), []
    try:
        while mine:
            tries.append(threading.Thread(target=_try, args=(mine[-1],), name="raycrew-kept", daemon=True))
            tries[-1].start()
            mine.pop()
    finally:
        with _lock:
            _kept.extend(mine)
    for one in tries:
        one.join(max(0.0, deadline - time.monotonic()))


def _try(give_back: Callable[[], bool]) -> None:
    is_done = False
    try:
        is_done = give_back()
    except Exception:
        logger.exception("what is kept could not be given back")
    finally:
        if not is_done:
            keep(give_back)
