"""Workers of a group that is observed; imported by name."""

import os
import time

from raycrew.worker_groups import current_worker


class Timed:
    def clock(self):
        """When this began and ended, by this node's monotonic clock."""
        return time.monotonic(), time.monotonic()

    def stream(self, n):
        yield from range(n)

    def slow_on(self, rank, seconds):
        time.sleep(seconds if current_worker().rank == rank else 0.0)
        return os.getpid()
