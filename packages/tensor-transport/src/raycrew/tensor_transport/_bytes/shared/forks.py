"""Locks, descriptors and sockets that a forked child may not share with its parent are made anew there.

A lock that another thread held when the process forked stays locked in the child for ever; memory that both
write, or a connection that both read, gives one of them the other's bytes.
"""

import os
import weakref
from typing import Protocol


class RemadeInChild(Protocol):
    """Has something that a forked child may not share."""

    def after_fork(self) -> None:
        """Called in the child, where only this thread lives: take new locks, let go of what is the parent's.

        It waits for no lock that was there before, and touches no file but to close it.
        """
        ...


_alive: "weakref.WeakSet[RemadeInChild]" = weakref.WeakSet()


def remake_in_child(thing: RemadeInChild) -> None:
    """Have `after_fork` of an object called in every child that is forked while it is alive."""
    _alive.add(thing)


def _remake_all() -> None:
    for thing in list(_alive):
        thing.after_fork()


os.register_at_fork(after_in_child=_remake_all)
