"""Where the rows of samples are: in memory, on disk for a while, or on disk for good."""

from raycrew.worker_groups.rollouts.samples._storage.durable import DurableRows
from raycrew.worker_groups.rollouts.samples._storage.rows import Held, Row, Rows, Standing, size_of
from raycrew.worker_groups.rollouts.samples._storage.spilling import SpillingRows

__all__ = ["DurableRows", "Held", "Row", "Rows", "SpillingRows", "Standing", "size_of"]
