"""What could not be given back when its time came: kept from being forgotten, and tried again on demand."""

import threading
from collections.abc import Callable

_kept: list[Callable[[], bool]] = []
_lock = threading.Lock()


def keep(give_back: Callable[[], bool]) -> None:
    """Keep something until it can be given back.

    Args:
        give_back: Tries to, within bounded time; says whether it is done with.
    """
    with _lock:
        _kept.append(give_back)


def try_again() -> None:
    """Try to give back all that is kept."""
    with _lock:
        mine, _kept[:] = list(_kept), []
    try:
        while mine:
            if mine[-1]():
                mine.pop()
            else:
                keep(mine.pop())
    finally:
        with _lock:
            _kept.extend(mine)
