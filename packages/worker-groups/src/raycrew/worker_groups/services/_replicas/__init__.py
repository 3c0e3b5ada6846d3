"""A replica of a service: a worker whose server is a process of its own, looked after and started anew."""

from raycrew.worker_groups.services._replicas.launching import ReplicaSpec
from raycrew.worker_groups.services._replicas.replica import Replica

__all__ = ["Replica", "ReplicaSpec"]
