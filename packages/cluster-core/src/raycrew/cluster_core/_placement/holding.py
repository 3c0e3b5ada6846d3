"""What a virtual cluster holds, and how it goes back: by a shutdown, or after the cluster was forgotten."""

import atexit
import logging
import os
import threading
import warnings
import weakref
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Literal

from ray.exceptions import GetTimeoutError

from raycrew.cluster_core import _ray
from raycrew.cluster_core._placement.allocation import Allocation
from raycrew.cluster_core._placement.claims import Claims
from raycrew.cluster_core._ports import PortKeepers
from raycrew.cluster_core.errors import ClusterClosedError, ClusterError
from raycrew.cluster_core.memory import MemoryMonitor

logger = logging.getLogger(__name__)

_PER_GROUP_S = 0.1
_EXIT_S = 5.0


class Holding:
    """What one virtual cluster holds over one connection to Ray: open, then closing, then closed.

    Knows nothing of the cluster, so that it can be given back after that is gone.

    Args:
        name: Readable name of the cluster.
        session: The connection.
        allocation: Its placement groups.
        claims: Who holds slots there.
        keepers: The port keepers of this process.
        owner: Whether the placement groups are its own; else it only shares them.
    """

    def __init__(
        self,
        name: str,
        session: _ray.Session,
        allocation: Allocation,
        claims: Claims,
        keepers: PortKeepers,
        *,
        owner: bool,
    ) -> None:
        self.name, self.session, self.owner = name, session, owner
        self.allocation, self.claims, self.keepers = allocation, claims, keepers
        self.monitor: MemoryMonitor | None = None
        self._state: Literal["open", "closing", "closed"] = "open"
        self._lock = threading.RLock()

    @property
    def is_open(self) -> bool:
        """Whether nobody has begun to give it back."""
        return self._state == "open"

    def check(self) -> None:
        """Make sure that it is there to be used.

        Raises:
            ClusterClosedError: It was given back, or the connection that it belongs to has ended.
        """
        if self._state != "open":
            is_over = "was" if self._state == "closed" else "is being"
            raise ClusterClosedError(f"virtual cluster {self.name!r} {is_over} shut down")
        self.session.check()

    def give_back(self) -> None:
        """Give everything back; idempotent, and returns when it is done, whoever began.

        With a connection that has ended everything went back by itself.
        """
        with self._lock:
            if self._state != "open":  # A signal handler may come here while it is being given back.
                return
            self._state = "closing"
            try:
                self._give_back()
            except BaseException:
                self._state = "open"
                raise
            self._state = "closed"

    def _give_back(self) -> None:
        if self.monitor is not None:
            self.monitor.close(timeout_s=5.0)
        if _ray.Session.current() != self.session:
            return
        try:
            _ray.ask(self._release, timeout_s=_ray.answer_s() + _PER_GROUP_S * len(self.allocation.groups))
        except GetTimeoutError as error:
            logger.warning("%r goes back once Ray's control service goes on: %s", self.name, error)
        except ClusterError:
            if _ray.Session.current() == self.session:
                raise

    def _release(self) -> None:
        with ExitStack() as stack:
            if self.owner:
                stack.callback(self.allocation.give_back)
                stack.callback(self.claims.close)
            stack.callback(self.keepers.close)


def give_back_when_forgotten(cluster: object, holding: Holding) -> None:
    """Give a holding back after its cluster was forgotten; at the end of the process Ray does."""
    _reaper.start()
    weakref.finalize(cluster, _forgotten, holding, os.getpid()).atexit = False


def _forgotten(holding: Holding, pid: int) -> None:
    """Runs in the middle of anything, so that it may neither wait nor call Ray."""
    if holding.is_open and os.getpid() == pid:
        _reaper.holdings.put(holding)
        warnings.warn(
            f"virtual cluster {holding.name!r} was forgotten without shutdown(); its bundles are given back",
            ResourceWarning,
            stacklevel=2,
        )


class _Reaper:
    """A daemon thread that gives back what was forgotten, and ends before Ray does."""

    def __init__(self) -> None:
        self.holdings: SimpleQueue[Holding | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                atexit.register(self._finish)  # Before Ray's own, which was registered earlier.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="raycrew-forgotten", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (holding := self.holdings.get()) is not None:
            try:
                holding.give_back()
            except Exception:
                logger.exception("%r was forgotten, and could not be given back", holding.name)

    def _finish(self) -> None:
        self.holdings.put(None)
        if self._thread is not None:
            self._thread.join(_EXIT_S)


_reaper = _Reaper()
