"""Which samples a queue has, of which version, ready for what, and in whose hands. Pure."""

from raycrew.worker_groups.rollouts.samples._states.keys import Keys
from raycrew.worker_groups.rollouts.samples._states.ledger import NO_FLOOR, Ledger, Stale
from raycrew.worker_groups.rollouts.samples._states.order import order_of
from raycrew.worker_groups.rollouts.samples._states.sample import GOES_ON, WHOLE, Sample, Use
from raycrew.worker_groups.rollouts.samples._states.versions import (
    Runs,
    VersionRun,
    extended,
    first_runs,
    number_of,
    per_token,
    whole,
)

__all__ = [
    "GOES_ON",
    "NO_FLOOR",
    "WHOLE",
    "Keys",
    "Ledger",
    "Runs",
    "Sample",
    "Stale",
    "Use",
    "VersionRun",
    "extended",
    "first_runs",
    "number_of",
    "order_of",
    "per_token",
    "whole",
]
