"""The life of a group: its states behind one lock, deaths of workers, and what is given back at the end."""

from raycrew.worker_groups._group.life.abandoned import InUse, watch_over
from raycrew.worker_groups._group.life.budget import RestartBudget
from raycrew.worker_groups._group.life.bundles import (
    ABANDONED_S,
    claim_bundles,
    claim_more,
    claim_places,
    end_and_release,
    log_left,
    release_when_free,
)
from raycrew.worker_groups._group.life.copied import CopiedLifecycle
from raycrew.worker_groups._group.life.ending import Ending
from raycrew.worker_groups._group.life.starting import Starting
from raycrew.worker_groups._group.life.states import Lifecycle
from raycrew.worker_groups._group.life.supervision import Supervision

__all__ = [
    "ABANDONED_S",
    "CopiedLifecycle",
    "Ending",
    "InUse",
    "Lifecycle",
    "RestartBudget",
    "Starting",
    "Supervision",
    "claim_bundles",
    "claim_more",
    "claim_places",
    "end_and_release",
    "log_left",
    "release_when_free",
    "watch_over",
]
