"""Which nodes there are and which this process is on, and calls of processes on them."""

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

from raycrew.tensor_transport._ray.compat import ray_module
from raycrew.tensor_transport._ray.gate import ask
from raycrew.tensor_transport._ray.objects import get, get_small
from raycrew.tensor_transport._ray.session import Session, current_session
from raycrew.tensor_transport.errors import (
    DirectoryLostError,
    ShardLostError,
    TransportError,
    TransportTimeoutError,
)

logger = logging.getLogger(__name__)


def is_connected() -> bool:
    """Whether this process is connected to a cluster; Ray is not imported to tell."""
    return Session.current() is not None


def connection_id() -> str:
    """What tells this process's connection to a cluster from others; empty without one."""
    return session.id if (session := Session.current()) is not None else ""


def where() -> str:
    """The node that this process is on; the machine's name without Ray, or a connection."""
    return current_node_id() if is_connected() else os.uname().nodename


def current_node_id() -> str:
    """Id of the node that this process is on."""
    ray = ray_module()
    with current_session().while_connected():
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id


def node_id_if_connected() -> str:
    """Id of the node that this process is on; "" without Ray, or a connection."""
    return current_node_id() if is_connected() else ""


def node_address() -> str | None:
    """The address of this node, as its cluster knows it; None without Ray, or a connection."""
    ray = ray_module() if is_connected() else None
    return None if ray is None else str(ray.util.get_node_ip_address())


def cluster_address_if_connected() -> str:
    """Address of the cluster that this process is connected to; "" without Ray, or a connection."""
    if not is_connected():
        return ""
    ray = ray_module()
    with current_session().while_connected():
        return str(ray.get_runtime_context().gcs_address)


def alive_node_ids() -> list[str]:
    """Ids of all nodes that are alive.

    Raises:
        TransportTimeoutError: Ray's control service does not answer.
    """
    return sorted(node["NodeID"] for node in _living_nodes())


def machine_addresses() -> set[str]:
    """Addresses of the machines that have nodes.

    Raises:
        TransportTimeoutError: Ray's control service does not answer.
    """
    return {node["NodeManagerAddress"] for node in _living_nodes()}


def _living_nodes() -> list[dict[str, Any]]:
    ray = ray_module()
    return [node for node in ask(lambda: ray.nodes()) if node["Alive"]]


def call_on_node(node_id: str, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
    """`fn(*args)` in a process on one node that takes no resources; raises what it raises.

    Raises:
        ShardLostError: The node is gone.
        TransportTimeoutError: It did not answer within `timeout_s`, or Ray's control service, which has to
            hand the function on, does not.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray, session = ray_module(), current_session()
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = {"num_cpus": 0, "max_retries": 1, "scheduling_strategy": strategy}
    answer = ask(lambda: ray.remote(fn).options(**options).remote(*args), session=session)
    try:
        return get(answer, timeout_s, session)
    except (ray.exceptions.TaskUnschedulableError, ray.exceptions.WorkerCrashedError) as error:
        raise ShardLostError(f"node {node_id} does not answer: {error}", node_id=node_id) from error


def start_on_node(cls: type, node_id: str) -> Any:
    """An actor of `cls` on one node that takes no resources.

    If it dies, it is restarted empty, and calls that it did not answer are repeated.

    Raises:
        TransportTimeoutError: Ray's control service does not answer; should it start it later, that is ended.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": strategy}
    return _start(cls, options, ())


def start_actor(cls: type, name: str | None, *args: Any) -> Any:
    """An actor of `cls` that takes no resources, on this process's node if that can be; it is not restarted.

    Raises:
        TransportTimeoutError: Ray's control service does not answer; should it start it later, that is ended.
    """
    node_id = current_node_id()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id, soft=True)
    return _start(cls, {"num_cpus": 0, "name": name, "scheduling_strategy": here}, args)


def _start(cls: type, options: dict[str, Any], args: tuple[Any, ...]) -> Any:
    ray = ray_module()
    return ask(
        lambda: ray.remote(cls).options(**options).remote(*args),
        undo=lambda actor: ray.kill(actor),
    )


def find_actor(name: str) -> Any:
    """The actor of a name.

    Raises:
        DirectoryLostError: There is none.
    """
    ray = ray_module()
    try:
        return ask(lambda: ray.get_actor(name))
    except ValueError as error:
        raise DirectoryLostError(f"there is no actor named {name!r}: {error}") from error


def send(session: Session, method: Any, *args: Any) -> Any:
    """Call a method of an actor over the session that its handle belongs to; gives an ObjectRef.

    Raises:
        TransportClosedError: The session has ended.
    """
    ray_module()  # Says so where this process can't call actors.
    with session.while_connected():
        return method.remote(*args)


def call_actor(session: Session, method: Any, args: tuple[Any, ...], timeout_s: float) -> Any:
    """The answer of an actor; what it raises as it raised it.

    Raises:
        TransportClosedError: The session that its handle belongs to has ended.
        ShardLostError: It is dead.
        TransportTimeoutError: It does not answer within `timeout_s`.
    """
    ray = ray_module()
    asked = send(session, method, *args)
    try:
        return get_small(asked, timeout_s, session)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TransportError | ValueError):
            raise error.cause from None
        raise
    except KeyboardInterrupt:  # Nothing is to begin later for who is gone.
        with contextlib.suppress(TransportError), session.while_connected():
            ray.cancel(asked)
        raise


def end_actors(session: Session, *actors: Any) -> None:
    """End actors for good; those of a session that has ended are gone."""
    if Session.current() != session:
        return
    ray = ray_module()
    try:
        ask(lambda: [ray.kill(actor) for actor in actors], session=session)
    except TransportTimeoutError as error:
        logger.warning("%d actors end once Ray's control service goes on: %s", len(actors), error)
