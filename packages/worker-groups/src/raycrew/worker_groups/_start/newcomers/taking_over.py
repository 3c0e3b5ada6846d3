"""Who stood by and is lost on the way to a rank: seen, so that another worker can be started in time."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from raycrew.cluster_core import NodeLostError
from raycrew.worker_groups._calls import has_died, parts_of
from raycrew.worker_groups._health import Seen, last_seen, why_stuck
from raycrew.worker_groups._start.newcomers.arrivals import Standby
from raycrew.worker_groups.errors import WorkerFailureError

_LOOK_S = 2.0
_ANSWER_S = 1.0


class StandbyLostError(Exception):
    """Who stood by was lost before it had its rank; the new workers have been ended, others can be made."""


class TakeOver:
    """Called now and then while workers that stood by take ranks over.

    A stopped process would be waited for as long as any `__init__` may take, though somebody else can be
    started in its place.

    Args:
        go_on: Called each time before.
        standbys: Who takes over.
    """

    def __init__(self, go_on: Callable[[], object], standbys: Sequence[Standby]) -> None:
        self._go_on = go_on
        self._facts = {position: standby.facts for position, standby in enumerate(standbys)}
        self._next = time.monotonic() + _LOOK_S

    def __call__(self) -> None:
        """Look again if it is time to.

        Raises:
            StandbyLostError: The process of one is stopped.
        """
        self._go_on()
        if self._facts and time.monotonic() >= self._next:
            self._look()
            self._next = time.monotonic() + _LOOK_S

    def _look(self) -> None:
        for position, seen in last_seen(self._facts, _ANSWER_S).items():
            if _is_stopped(seen):
                pid = self._facts[position].pid
                raise StandbyLostError(f"process {pid}, which stood by, is stopped")

    def is_over(self) -> None:
        """Take in that they are ranks like any other from now on."""
        self._facts = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, they take over.

        Raises:
            StandbyLostError: One has died of it, or its node is gone.
        """
        try:
            yield
        except WorkerFailureError as error:
            died = {part.pid for part in parts_of(error) if has_died(part)}
            if lost := died.intersection(facts.pid for facts in self._facts.values()):
                who = ", ".join(map(str, sorted(filter(None, lost))))
                raise StandbyLostError(f"process {who}, which stood by, died: {error.message}") from error
            raise
        except NodeLostError as error:
            if {facts.node_id for facts in self._facts.values()}.intersection(error.node_ids):
                raise StandbyLostError(f"the node of one that stood by is gone: {error}") from error
            raise


def _is_stopped(seen: Seen) -> bool:
    stuck = why_stuck(seen, math.inf)
    return stuck is not None and stuck[0] == "stopped"
