"""The ports at which a group meets, held by the process of its rank 0."""

from raycrew.cluster_core import lease_ports
from raycrew.worker_groups._ranks import RankInfo


class MeetingPorts:
    """Two leased ports, of this generation and of the next, in case this process is rank 0.

    Args:
        port_range: First and last port to lease from.
    """

    def __init__(self, port_range: tuple[int, int] | None) -> None:
        self._range = port_range
        self._leases = [lease_ports(port_range=port_range) for _ in range(2)]

    @property
    def ports(self) -> tuple[int, ...]:
        """This generation's and the next one's; none once this process turned out to be another rank."""
        return tuple(lease.port for lease in self._leases)

    def take(self, worker: RankInfo) -> int:
        """Take a place in a generation; returns where the next one will meet if this stays rank 0."""
        while self._leases and worker.rank != 0:
            self._leases.pop().release()
        if not self._leases:
            return 0
        if worker.master_port == self._leases[1].port:
            self._leases.append(lease_ports(port_range=self._range))
            self._leases.pop(0).release()
        return self._leases[1].port
