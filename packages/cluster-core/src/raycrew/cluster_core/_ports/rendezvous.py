"""Ports leased on the nodes of a cluster, held there by one small actor per node until they are let go."""

from collections.abc import Callable
from threading import Lock
from typing import Any

from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycrew.cluster_core import _ray
from raycrew.cluster_core._planning import Rendezvous
from raycrew.cluster_core._ports.leases import PortLease, lease_ports
from raycrew.cluster_core.errors import ClusterClosedError, ClusterError, NodeLostError


class PortKeeper:
    """Runs on a node and keeps ports leased there as long as it lives."""

    def __init__(self) -> None:
        self._leases: list[PortLease] = []

    def lease(
        self, count: int, port_range: tuple[int, int] | None, consecutive: bool
    ) -> tuple[str, tuple[int, ...]]:
        """Lease ports of this node; return its address and the ports."""
        lease = lease_ports(count, port_range=port_range, consecutive=consecutive)
        self._leases.append(lease)
        return _ray.node_address(), lease.ports


class PortKeepers:
    """The port keepers of one cluster, each started when its node is first asked for ports.

    Args:
        port_range: First and last port to choose from, or None for the default range.
        timeout_s: Deadline of one lease, the start of its keeper included.
    """

    def __init__(self, port_range: tuple[int, int] | None = None, timeout_s: float = 60.0) -> None:
        self._port_range = port_range
        self._timeout_s = timeout_s
        self._keepers: dict[str, Any] = {}
        self._closed = False
        self._lock = Lock()

    def lease(self, node_id: str, count: int = 1, *, consecutive: bool = False) -> Rendezvous:
        """Lease ports on a node until `close()`.

        Raises:
            ValueError: `count` is below one or larger than the range.
            PortsExhaustedError: Too few ports of the range are free on the node.
            NodeLostError: The node is gone.
            ClusterClosedError: They were closed.
            ClusterError: The node did not answer in time.
        """
        return self.start(node_id, count, consecutive=consecutive)()

    def start(self, node_id: str, count: int = 1, *, consecutive: bool = False) -> Callable[[], Rendezvous]:
        """Ask for ports on a node without waiting; the returned function waits for them."""
        session, keeper = _ray.check_connected(), self._keeper(node_id)
        with session.while_connected():
            ref = keeper.lease.remote(count, self._port_range, consecutive)
        return lambda: self._wait(node_id, session, keeper, ref)

    def _wait(self, node_id: str, session: _ray.Session, keeper: Any, ref: Any) -> Rendezvous:
        try:
            address, ports = session.get(ref, timeout=self._timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, (ClusterError, ValueError, TypeError)):
                raise error.cause from None
            raise
        except (GetTimeoutError, ActorUnavailableError) as error:  # The keeper lives on, with what it holds.
            raise ClusterError(
                f"node {node_id[:8]} gave no answer within {self._timeout_s:g} s, or it was lost on the way"
            ) from error
        except (RayActorError, ActorUnschedulableError) as error:
            with self._lock:
                if self._keepers.get(node_id) is keeper:  # and none that has taken its place
                    del self._keepers[node_id]
            raise NodeLostError(
                f"node {node_id[:8]} is gone, or its port keeper was killed: {error}", [node_id]
            ) from error
        return Rendezvous(node_id, address, tuple(ports))

    def _keeper(self, node_id: str) -> Any:
        with self._lock:
            if self._closed:
                raise ClusterClosedError("the ports of this virtual cluster went back when it was shut down")
            if node_id not in self._keepers:
                strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
                options = {"num_cpus": 0, "scheduling_strategy": strategy, "max_concurrency": 1}
                self._keepers[node_id] = _ray.start_actor(options, PortKeeper)
            return self._keepers[node_id]

    def close(self) -> None:
        """Let all ports go, and lease no others; idempotent."""
        with self._lock:
            self._closed = True
            while self._keepers:
                _, keeper = self._keepers.popitem()
                _ray.end_actor(keeper)
