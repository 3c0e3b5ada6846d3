"""Diagnoses that a group makes by itself: few, soon over, and never in the way of what they are made for."""

import logging
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ray.exceptions import TaskCancelledError

from raycrew.worker_groups._health.diagnosis.diagnosis import Diagnosis
from raycrew.worker_groups.errors import WorkerGroupError

logger = logging.getLogger(__name__)

_PAUSE_S = 10.0  # what happens so soon after the last one is told of in that
_WAIT_S = 10.0  # for one that another thread makes
_KEPT = 10  # in one folder, besides the first one, which mostly tells the cause
_KNOWN = 1000

#: What was made by now that may still be there, by process and folder.
_made: defaultdict[tuple[int, Path], list[Path]] = defaultdict(list)


class Diagnoses:
    """Of one group.

    Args:
        make: Makes one, of the reason.
        clock: Seconds.
    """

    def __init__(self, make: Callable[[str], Diagnosis], clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._clock = make, clock
        self._lock = threading.RLock()  # a signal's handler may come back
        self._is_making = False
        self._last: Path | None = None
        self._due = clock()
        self._of: dict[Hashable, Path] = {}

    def tell(self, error: WorkerGroupError, whose: Hashable) -> None:
        """Have an error and its parts say where the diagnosis made for it lies; cancelled calls need none."""
        if not isinstance(getattr(error, "cause", None), TaskCancelledError):
            folder = self.folder_for(str(error), [whose])
            for part in (error, *getattr(error, "exceptions", ())):  # `except*` may hand out the parts alone
                part.diagnosis = folder

    def folder_for(self, reason: str, whose: Collection[Hashable]) -> Path | None:
        """Where a diagnosis lies that was made for these, now or before; None where there is none.

        So it is where one can't be made, for a signal's handler whose thread makes one at that moment, and
        where another thread makes one for too long.
        """
        with self._alone() as is_alone:
            return self._folder_for(reason, whose) if is_alone else None

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether nobody makes one: another thread is waited for."""
        if not self._lock.acquire(timeout=_WAIT_S):
            yield False
            return
        before, self._is_making = self._is_making, True
        try:
            yield not before
        finally:
            self._is_making = before
            self._lock.release()

    def _folder_for(self, reason: str, whose: Collection[Hashable]) -> Path | None:
        before = {self._of.get(each) for each in whose}
        known = before.pop() if len(before) == 1 else None
        if known is not None and known.exists():
            return known
        is_removed = self._last is not None and not self._last.exists()
        if is_removed or self._clock() >= self._due:
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
        made = _made[os.getpid(), folder.parent]
        made.append(folder)
        while len(made) > 1 + _KEPT:
            shutil.rmtree(made.pop(1), ignore_errors=True)
        return folder
