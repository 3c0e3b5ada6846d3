"""Locks of modules, where a process is forked: the thread that holds one is not there to let go of it."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A lock of a module, or the like: in each process that is forked from this a new one, held by nobody.

    Args:
        make: Makes it.

    Attributes:
        here: That of this process. What is taken before a fork is let go of after it, in both processes.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.here = self._make()


class CachedProperty(cached_property[T]):
    """A `cached_property` as from Python 3.12 on: before, one lock is held for all objects of a class."""

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock = nullcontext()
