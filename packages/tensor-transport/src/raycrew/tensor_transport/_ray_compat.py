"""Every Ray call of this package, one function each; importing this module does not import Ray."""

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from raycrew.tensor_transport.errors import (
    DirectoryLostError,
    ShardLostError,
    TransportError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.protocols import Bytes

_forked_from: list[int] = []
"""The process that used Ray and that this one was forked from, if there is one."""


def _note_fork() -> None:
    ray = sys.modules.get("ray")
    if getattr(ray, "is_initialized", bool)():
        _forked_from[:] = [os.getppid()]


os.register_at_fork(after_in_child=_note_fork)


def ray_module() -> Any:
    """The `ray` module.

    Raises:
        TransportError: Ray is not installed, or was in use when this process was forked.
    """
    if _forked_from:
        raise TransportError(
            f"process {os.getpid()} was forked from {_forked_from[0]}, which uses Ray, and can't use it "
            "itself: start it with the method spawn or forkserver, or let it put with a SharedMemoryBackend"
        )
    try:
        import ray
    except ImportError as error:
        raise TransportError("Ray is not installed: install raycrew-tensor-transport[ray]") from error
    return ray


def put(value: Any) -> Any:
    """Copy `value` into the object store of this node; an ObjectRef owned by this process.

    Raises:
        TransportError: Store and disk are full.
    """
    ray = ray_module()
    try:
        return ray.put(value)
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise _no_room(error) from error


def get(ref: Any, timeout_s: float | None = None) -> Any:
    """Read an object, in place where its type allows.

    Raises:
        TransportTimeoutError: It did not arrive within `timeout_s`.
        ShardLostError: Its owner died or its bytes are lost.
        TransportError: Store and disk are full.
    """
    ray = ray_module()
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise TransportTimeoutError(f"{_names(ref)} did not arrive within {timeout_s} s") from error
    except ray.exceptions.ObjectLostError as error:
        message = f"{_names(ref)} lost: the process that put it died, or its node is gone"
        raise ShardLostError(message) from error
    except ray.exceptions.RayActorError as error:
        raise ShardLostError(f"the actor asked is dead or cannot be reached: {error}") from error
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise _no_room(error) from error


def not_here(refs: list[Any], timeout_s: float) -> list[Any]:
    """Those objects that are not on this node after a while; a lost one counts as being here."""
    left: list[Any] = ray_module().wait(refs, num_returns=len(refs), timeout=timeout_s)[1]
    return left


def where() -> str:
    """The node that this process is on; the machine's name without Ray, or a connection."""
    ray = sys.modules.get("ray")
    if _forked_from or ray is None or not ray.is_initialized():
        return os.uname().nodename
    return current_node_id()


def current_node_id() -> str:
    """Id of the node that this process is on."""
    node_id: str = ray_module().get_runtime_context().get_node_id()
    return node_id


def alive_node_ids() -> list[str]:
    """Ids of all nodes that are alive."""
    return sorted(node["NodeID"] for node in ray_module().nodes() if node["Alive"])


def machine_addresses() -> set[str]:
    """Addresses of the machines that have nodes."""
    return {node["NodeManagerAddress"] for node in ray_module().nodes() if node["Alive"]}


def node_address() -> str | None:
    """The address of this node, as its cluster knows it; None without Ray, or a connection."""
    return str(ray_module().util.get_node_ip_address()) if is_connected() else None


def is_connected() -> bool:
    """Whether this process is connected to a cluster; Ray is not imported to tell."""
    ray = sys.modules.get("ray")
    return not _forked_from and ray is not None and bool(ray.is_initialized())


def moves_by_nixl() -> bool:
    """Whether this Ray's `put` takes a transport for tensors."""
    return "_tensor_transport" in inspect.signature(ray_module().put).parameters


def register_nixl_pool(size_bytes: int, device: Any) -> None:
    """Register memory with NIXL once, for what is received."""
    ray_module()
    from ray.experimental.rdt import register_nixl_memory_pool

    register_nixl_memory_pool(size_bytes, device)


def put_by_nixl(tensor: Any) -> Any:
    """An object whose tensor stays where it is, for others to read by NIXL."""
    return ray_module().put([tensor], _tensor_transport="nixl")


def get_by_nixl(ref: Any, into: Any, timeout_s: float | None) -> Any:
    """The tensor of such an object: written into another one, unless that is None.

    Raises:
        TransportTimeoutError: It did not arrive in time; it may still be written.
        ShardLostError: Its owner died.
    """
    ray_module()
    from ray.experimental.rdt import set_target_for_ref

    if into is not None:
        set_target_for_ref(ref, [into])
    (found,) = get(ref, timeout_s)
    return found


def node_id_if_connected() -> str:
    """Id of the node that this process is on; "" without Ray, or a connection."""
    return current_node_id() if is_connected() else ""


def cluster_address_if_connected() -> str:
    """Address of the cluster that this process is connected to; "" without Ray, or a connection."""
    return str(ray_module().get_runtime_context().gcs_address) if is_connected() else ""


def references_held() -> frozenset[str] | None:
    """Ids of the objects of this process that anybody in the cluster refers to; None where nobody knows.

    It takes microseconds for each object that this process ever referred to and still does.
    """
    ray = ray_module()
    if not ray.is_initialized():
        return frozenset()
    try:
        counts = _core_worker().get_all_reference_counts()
    except AttributeError:
        return None
    return frozenset(i.decode() if isinstance(i, bytes) else i for i in counts)


def counts_references() -> bool:
    """Whether this Ray says which objects are referred to."""
    return hasattr(_core_worker(), "get_all_reference_counts")


def when_unreferenced(ref: Any, tell: Callable[[str], object]) -> bool:
    """Have `tell` called with an object's id, in some thread, when nobody refers to it any more.

    Returns:
        Whether this Ray can; it is called once then, and else never.
    """
    add = getattr(_core_worker(), "add_object_out_of_scope_callback", None)
    return add is not None and bool(add(ref, lambda gone: tell(gone.hex())))


def connection_id() -> str:
    """What tells this process's connection to a cluster from others; empty without one."""
    ray = ray_module()
    return str(ray.get_runtime_context().get_worker_id()) if ray.is_initialized() else ""


def _core_worker() -> Any:
    return ray_module().get_runtime_context().worker.core_worker


def call_on_node(node_id: str, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
    """`fn(*args)` in a process on one node that takes no resources; raises what it raises.

    Raises:
        ShardLostError: The node is gone.
        TransportTimeoutError: It did not answer within `timeout_s`.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = ray_module()
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(fn).options(num_cpus=0, max_retries=1, scheduling_strategy=strategy)
    try:
        return get(task.remote(*args), timeout_s)
    except (ray.exceptions.TaskUnschedulableError, ray.exceptions.WorkerCrashedError) as error:
        raise ShardLostError(f"node {node_id} does not answer: {error}", node_id=node_id) from error


def start_on_node(cls: type, node_id: str) -> Any:
    """An actor of `cls` on one node that takes no resources.

    If it dies, it is restarted empty, and calls that it did not answer are repeated.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor = ray_module().remote(cls)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    return actor.options(scheduling_strategy=strategy, **options).remote()


def start_actor(cls: type, name: str | None, *args: Any) -> Any:
    """An actor of `cls` that takes no resources, anywhere; it is not restarted."""
    return ray_module().remote(cls).options(num_cpus=0, name=name).remote(*args)


def find_actor(name: str) -> Any:
    """The actor of a name.

    Raises:
        DirectoryLostError: There is none.
    """
    try:
        return ray_module().get_actor(name)
    except ValueError as error:
        raise DirectoryLostError(f"there is no actor named {name!r}: {error}") from error


def call_actor(method: Any, args: tuple[Any, ...], timeout_s: float) -> Any:
    """The answer of an actor; what it raises as it raised it.

    Raises:
        ShardLostError: It is dead.
        TransportTimeoutError: It does not answer within `timeout_s`.
    """
    ray = ray_module()
    try:
        return get(method.remote(*args), timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TransportError | ValueError):
            raise error.cause from None
        raise


def kill(actor: Any) -> None:
    """End an actor for good."""
    ray_module().kill(actor)


def _no_room(error: Exception) -> TransportError:
    why = str(getattr(error, "cause", error)).splitlines()[0]
    return TransportError(
        f"no room in Ray's object store, nor on the disk that it spills to ({why}): "
        "release shards, or expire() old steps"
    )


def _names(ref: Any) -> str:
    return f"one of {len(ref)} objects" if isinstance(ref, list) else f"object {ref.hex()}"


class RayByteStore:
    """Bytes in Ray's object store; tickets are ObjectRefs, read in place on any node.

    Objects live as long as the process that put them, and as long as any process holds their ticket.
    """

    release_scope = ""

    def put(self, data: Bytes) -> Any:
        """Copy `data` into shared memory."""
        return put(data)

    def get(self, ticket: Any, timeout_s: float | None = None) -> Bytes:
        """The bytes, read-only and in place."""
        data: Bytes = get(ticket, timeout_s)
        return data

    def release(self, ticket: Any) -> None:
        """Nothing to do: an object goes with its last reference."""
