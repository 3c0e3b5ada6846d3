"""The life of a group: its states behind one lock, and what is given back when nobody ends it."""

from raycrew.worker_groups._life.abandoned import Keeper, catch_up, watch_over
from raycrew.worker_groups._life.budget import RestartBudget
from raycrew.worker_groups._life.leftovers import keep, try_again
from raycrew.worker_groups._life.states import CopiedLifecycle, Lifecycle

__all__ = [
    "CopiedLifecycle",
    "Keeper",
    "Lifecycle",
    "RestartBudget",
    "catch_up",
    "keep",
    "try_again",
    "watch_over",
]
