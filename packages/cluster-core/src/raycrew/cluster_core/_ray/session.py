"""Which connection to Ray something belongs to."""

import importlib
import weakref
from dataclasses import dataclass
from typing import Any, Self

import ray

from raycrew.cluster_core.errors import ClusterClosedError

_Known = tuple[weakref.ref[Any], str]

# Ray's public ways to its own ids connect where there is no connection, or ask the proxy.
ray_worker: Any = importlib.import_module("ray._private.worker")
_known: list[_Known | None] = [None]


@dataclass(frozen=True, slots=True)
class Session:
    """This process's connection to Ray, as Ray itself names it.

    What talks to Ray keeps the session that it belongs to and checks it before each use: by itself Ray would
    connect again, perhaps to another cluster, and wait there for what only the first one has.

    Attributes:
        id: The cluster's session and the job in it, which a driver and its workers share; behind a `ray://`
            proxy the client's own id. Never the same again after a `ray.shutdown()`.
    """

    id: str

    @classmethod
    def current(cls) -> Self | None:
        """The session of this process, or None where it is not connected to Ray.

        Never connects and asks nobody, so it may be called often, and from any thread.
        """
        found = _client_id() if is_client() else _job_id()
        return None if found is None else cls(found)

    def check(self) -> None:
        """Make sure that this process is still connected to Ray by this session.

        Raises:
            ClusterClosedError: It is not, or by another session.
        """
        current = type(self).current()
        if current == self:
            return
        now = "this process is not connected to Ray" if current is None else f"now it is {current.id}"
        raise ClusterClosedError(
            f"the connection to Ray that this belongs to, {self.id}, has ended; {now}. What was made over it "
            "is gone: connect with init_ray() if need be, and make it anew"
        )


def is_client() -> bool:
    """Whether this process is connected through a `ray://` proxy."""
    client: Any = ray.util.client.ray
    return bool(client.is_connected())


def _job_id() -> str | None:
    worker: Any = ray_worker.global_worker
    while worker.connected:
        node, known = worker.node, _known[0]  # Each connection has a node of its own.
        if known is None or known[0]() is not node:
            known = _known[0] = _ask(worker, node)
        if known is None or worker.node is node:
            return None if known is None else known[1]
    return None


def _ask(worker: Any, node: Any) -> _Known | None:
    """The job of a connection, from this process's own part of Ray, which must not end meanwhile."""
    with ray_worker._connect_or_shutdown_lock:  # noqa: SLF001 - no public name; ray.shutdown() holds it
        if not worker.connected or worker.node is not node or worker.current_job_id.is_nil():
            return None
        return weakref.ref(node), f"{node.session_name}/{worker.current_job_id.hex()}"


def _client_id() -> str | None:
    client: Any = ray.util.client.ray
    worker = client.get_context().client_worker
    return None if worker is None else f"ray-client/{dict(worker.metadata)['client_id']}"
