"""Workers that come to a group that has started: for those that died, for more, and to stand by."""

from raycrew.worker_groups._start.newcomers.arrivals import Standby
from raycrew.worker_groups._start.newcomers.generations import add_workers, next_generation
from raycrew.worker_groups._start.newcomers.standbys import park, record_of_standby
from raycrew.worker_groups._start.newcomers.taking_over import StandbyLostError

__all__ = ["Standby", "StandbyLostError", "add_workers", "next_generation", "park", "record_of_standby"]
