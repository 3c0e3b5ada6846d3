"""The worker class of a service's replicas."""

from raycrew.worker_groups._worker import current_worker
from raycrew.worker_groups.services._endpoint import ReplicaState
from raycrew.worker_groups.services._replicas.launching import ReplicaSpec
from raycrew.worker_groups.services._replicas.upkeep import Upkeep


class Replica:
    """A worker that keeps a server up; the server is ready when `__init__` returns.

    Args:
        spec: What all replicas are told.

    Raises:
        ServiceStartError: The server did not become ready.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        here = current_worker()
        self._grace_s = spec.options.grace_s
        self._upkeep = Upkeep(spec, here.node_address, here.rank)
        self._upkeep.begin()

    def state(self) -> ReplicaState:
        """How it is."""
        return self._upkeep.state

    def stop(self) -> bool:
        """End the server; whether nothing of it is left."""
        return self._upkeep.stop(self._grace_s)
