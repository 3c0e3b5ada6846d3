"""The ports at which a group meets, held by the process of its rank 0."""

import logging

from raycrew.cluster_core import PortLease, PortsExhaustedError, lease_ports
from raycrew.worker_groups.sharding import RankInfo

logger = logging.getLogger(__name__)


class MeetingPorts:
    """Two leased ports, of this generation and of the next, in case this process is rank 0.

    Args:
        port_range: First and last port to lease from.
    """

    def __init__(self, port_range: tuple[int, int] | None) -> None:
        self._range = port_range
        self._leases: list[PortLease] = []
        for _ in range(2):
            self._lease()

    @property
    def ports(self) -> tuple[int, ...]:
        """This generation's and the next one's; none once this process turned out to be another rank."""
        return tuple(lease.port for lease in self._leases)

    def take(self, worker: RankInfo) -> int:
        """Take a place in a generation.

        Returns:
            Where the next one will meet if this stays rank 0; 0 where no port is free for that.
        """
        while self._leases and worker.rank != 0:
            self._leases.pop().release()
        if len(self._leases) > 1 and worker.master_port == self._leases[1].port:
            self._lease_if_any()  # while this generation's and the last one's are held: it must be another
            self._leases.pop(0).release()
        return self._leases[1].port if len(self._leases) > 1 else 0

    def next_port(self) -> int:
        """Where the next generation will meet, leased now if there was none before.

        Raises:
            PortsExhaustedError: No port is free.
        """
        while len(self._leases) < 2:
            self._lease()
        return self._leases[1].port

    def _lease(self) -> None:
        self._leases.append(lease_ports(port_range=self._range))

    def _lease_if_any(self) -> None:
        try:
            self._lease()
        except PortsExhaustedError as error:
            logger.warning("the next generation has no port to meet at yet: %s", error)
