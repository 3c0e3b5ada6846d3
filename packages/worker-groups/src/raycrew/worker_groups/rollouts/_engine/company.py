"""Who was in a process that died, and whose turn it is to have one alone: whose fault it is shows there."""

import threading
from collections import Counter
from collections.abc import Collection, Sequence

from raycrew.worker_groups.balancing import WorkerLoad

#: Rank and generation.
Process = tuple[int, int]


class Company:
    """Of the processes of a pool, by all of its collections; may be used from several threads."""

    def __init__(self) -> None:
        self._inside: Counter[Process] = Counter()
        self._kept: dict[object, int] = {}
        self._lock = threading.Lock()

    def enter(self, process: Process) -> None:
        """A rollout was sent to a process."""
        with self._lock:
            self._inside[process] += 1

    def leave(self, process: Process) -> None:
        """It has ended, and the process lives."""
        with self._lock:
            self._inside[process] -= 1

    def was_alone(self, process: Process) -> bool:
        """Whether a process that died had one rollout in it; all that were in it are told the same."""
        with self._lock:
            return self._inside[process] <= 1

    def keep(self, owner: object, loads: Sequence[WorkerLoad]) -> WorkerLoad | None:
        """The worker that is kept for the rollouts of one owner, from now on; None while there is none.

        Nothing more is to be sent there, so that it has nothing to do some time.
        """
        by_rank = {load.rank: load for load in loads}
        with self._lock:
            if self._kept.get(owner) not in by_rank:
                self._kept.pop(owner, None)
                free = [load for load in loads if load.rank not in self._kept.values()]
                if not free:
                    return None
                self._kept[owner] = min(free, key=lambda load: load.outstanding).rank
            return by_rank[self._kept[owner]]

    def let_go(self, owner: object) -> None:
        """Keep none for this owner any more; idempotent."""
        with self._lock:
            self._kept.pop(owner, None)

    def kept(self, besides: object) -> Collection[int]:
        """The ranks that are kept for somebody; one that is kept for `besides` is left out."""
        with self._lock:
            return [rank for owner, rank in self._kept.items() if owner is not besides]
