"""What belongs to one process: it is left once, and refused by name in a forked child."""

import os
import threading
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from raycrew.tensor_transport._bytes.closing import Closing
from raycrew.tensor_transport._bytes.shared.forks import remake_in_child
from raycrew.tensor_transport.errors import TransportError


class Belonging(Closing):
    """A context manager of the process that made it; a forked child has a lock of its own, and may let go."""

    def __init__(self) -> None:
        self._lock: AbstractContextManager[Any] = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        remake_in_child(self)

    @abstractmethod
    def close(self) -> None:
        """Give up what is held; idempotent, and nothing in a forked child."""

    def after_fork(self) -> None:
        """What is held is the parent's."""
        self._lock = threading.Lock()
        self._let_go()

    @property
    def _is_parents(self) -> bool:
        """Whether this process was forked from the one that it belongs to."""
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        if self._is_parents:
            raise TransportError(self._foreign())

    def _foreign(self) -> str:
        """Why a forked child can't use it, and what to do there."""
        return f"this {type(self).__name__} is that of process {self._pid}; after a fork, make another one"

    def _let_go(self) -> None:
        """Keep what the parent has from being ended by a forked child."""
