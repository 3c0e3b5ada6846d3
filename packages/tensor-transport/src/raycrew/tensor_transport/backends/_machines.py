"""Whether a cluster has several machines, as far as one can tell without waiting for it."""

import logging
import threading
import time

from raycrew.tensor_transport import _ray
from raycrew.tensor_transport._bytes import remake_in_child
from raycrew.tensor_transport.errors import TransportTimeoutError

log = logging.getLogger(__name__)

_KNOWN_S = 10.0
_ASKING_SHARE = 20  # A control service that is slow to answer is asked at most a twentieth of the time.


class Machines:
    """Asks Ray's control service now and then, one thread at a time; the others go by what is known."""

    def __init__(self) -> None:
        self._connection, self._several, self._ask_at = "", True, float("-inf")
        self._asking = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """A thread that held the lock is not there to let go of it."""
        self._asking = threading.Lock()

    def has_several(self) -> bool:
        """Whether there are several; True where nobody answered yet.

        Raises:
            TransportClosedError: This process is not connected to Ray.
        """
        connection = _ray.connection_id()
        if self._is_due(connection) and self._asking.acquire(blocking=connection != self._connection):
            try:
                if self._is_due(connection):
                    self._ask(connection)
            finally:
                self._asking.release()
        return self._several

    def _is_due(self, connection: str) -> bool:
        return connection != self._connection or time.monotonic() >= self._ask_at

    def _ask(self, connection: str) -> None:
        began, several = time.monotonic(), self._several or connection != self._connection
        try:
            several = len(_ray.machine_addresses()) > 1
        except TransportTimeoutError as error:
            place = "Ray's object store" if several else "memory that is lent"
            log.warning("how many machines the cluster has is not known; tensors go to %s: %s", place, error)
        ended = time.monotonic()
        self._connection, self._several = connection, several
        self._ask_at = ended + max(_KNOWN_S, _ASKING_SHARE * (ended - began))
