"""What a virtual cluster holds, and how it goes back."""

import logging
import threading
from contextlib import ExitStack
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
        self._is_busy = False
        self._lock = threading.RLock()

    @property
    def is_open(self) -> bool:
        """Whether nobody has begun to give it back."""
        return self._state == "open"

    @property
    def is_held(self) -> bool:
        """Whether it has not all been given back."""
        return self._state != "closed"

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

        One that failed or was interrupted can be repeated; until then it is closing.
        With a connection that has ended everything went back by itself.
        """
        with self._lock:
            if self._is_busy or not self.is_held:  # A signal handler may come here in the middle of it.
                return
            self._state, self._is_busy = "closing", True
            try:
                self._give_back()
            finally:
                self._is_busy = False
            self._state = "closed"
            self.claims.are_held = not self.owner

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
