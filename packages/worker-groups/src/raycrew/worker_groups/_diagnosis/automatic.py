"""Diagnoses that a group makes by itself: few, soon over, and never in the way of what they are made for."""

import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable
from pathlib import Path

from ray.exceptions import TaskCancelledError

from raycrew.worker_groups._diagnosis.diagnosis import Diagnosis
from raycrew.worker_groups.errors import WorkerGroupError

logger = logging.getLogger(__name__)

_PAUSE_S = 10.0  # what happens so soon after the last one is told of in that
_KEPT = 10
_KNOWN = 1000


class Diagnoses:
    """Of one group.

    Args:
        make: Makes one, of the reason.
        clock: Seconds.
    """

    def __init__(self, make: Callable[[str], Diagnosis], clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._clock = make, clock
        self._lock = threading.Lock()
        self._made: deque[Path] = deque()
        self._last: Path | None = None
        self._due = clock()
        self._of: dict[Hashable, Path] = {}

    def tell(self, error: WorkerGroupError, whose: Hashable) -> None:
        """Have an error say where the diagnosis that is made for it lies; cancelled calls need none."""
        if not isinstance(getattr(error, "cause", None), TaskCancelledError):
            error.diagnosis = self.folder_for(str(error), [whose])

    def folder_for(self, reason: str, whose: Collection[Hashable]) -> Path | None:
        """Where a diagnosis lies that was made for these, now or before; None where it could not be made."""
        with self._lock:
            before = {self._of.get(each) for each in whose}
            known = before.pop() if len(before) == 1 else None
            if known is not None and known.exists():
                return known
            if self._clock() >= self._due:
                self._last = self._anew(reason)
                self._due = self._clock() + _PAUSE_S
            if self._last is not None:
                self._of |= dict.fromkeys(whose, self._last)
            while len(self._of) > _KNOWN:
                del self._of[next(iter(self._of))]
            return self._last

    def _anew(self, reason: str) -> Path | None:
        try:
            folder = self._make(reason).folder
        except Exception as error:  # noqa: BLE001 - what it was made for is told in any case
            logger.warning("no diagnosis could be made: %s: %s", type(error).__name__, error)
            return None
        self._made.append(folder)
        while len(self._made) > _KEPT:
            shutil.rmtree(self._made.popleft(), ignore_errors=True)
        return folder
