"""Where the rows of samples are: in memory, or on disk."""

from raycrew.worker_groups.samples._storage.rows import Held, Row, Rows, SpilledRows, size_of

__all__ = ["Held", "Row", "Rows", "SpilledRows", "size_of"]
