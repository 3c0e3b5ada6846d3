"""Locks of modules, where a process is forked: the thread that held one is not there to let go of it."""

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class ModuleLock:
    """A lock that is new, and held by nobody, in each process that is forked from this one.

    Args:
        make: Makes it.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]] = threading.Lock) -> None:
        self._make = make
        self._lock = make()
        os.register_at_fork(after_in_child=self._renew)

    def __enter__(self) -> None:
        """Take it."""
        self._lock.__enter__()

    def __exit__(self, *raised: object) -> None:
        """Let go of it."""
        self._lock.__exit__(None, None, None)

    def _renew(self) -> None:
        self._lock = self._make()
