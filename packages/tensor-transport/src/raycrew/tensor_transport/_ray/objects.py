"""Objects in Ray's store: put, got, waited for, counted; over this process's connection, and no other one."""

import math
from collections.abc import Callable
from typing import Any

from raycrew.tensor_transport._ray.compat import core_worker, ray_module
from raycrew.tensor_transport._ray.session import Session, current_session
from raycrew.tensor_transport._ray.waiting import await_ready, await_told, is_beside, not_ready
from raycrew.tensor_transport.errors import (
    ShardLostError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.protocols import Bytes


def put(value: Any) -> Any:
    """Copy `value` into the object store of this node; an ObjectRef owned by this process.

    Raises:
        TransportClosedError: This process is not connected to Ray.
        TransportError: Store and disk are full.
    """
    ray = ray_module()
    try:
        with current_session().while_connected():
            return ray.put(value)
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise _no_room(error) from error


def get(ref: Any, timeout_s: float | None = None, session: Session | None = None) -> Any:
    """Read an object, in place where its type allows; over a session, this process's unless named.

    Raises:
        TransportClosedError: This process is not connected to Ray, or was not by this connection when it got
            to know of the object.
        TransportTimeoutError: It did not arrive within `timeout_s`.
        ShardLostError: Its owner died or its bytes are lost.
        TransportError: Store and disk are full.
    """
    ray = ray_module()
    session = session or current_session()
    timeout_s = None if timeout_s == math.inf else timeout_s  # Ray counts in whole milliseconds.
    try:
        with session.while_connected():
            left_s = await_ready(ref, timeout_s, session) if is_beside() else timeout_s
            return ray.get(ref, timeout=left_s)
    except ray.exceptions.GetTimeoutError as error:
        raise TransportTimeoutError(f"{_names(ref)} did not arrive within {timeout_s} s") from error
    except ray.exceptions.ObjectLostError as error:
        message = f"{_names(ref)} lost: the process that put it died, or its node is gone"
        raise ShardLostError(message) from error
    except ray.exceptions.RayActorError as error:
        raise ShardLostError(f"the actor asked is dead or cannot be reached: {error}") from error
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise _no_room(error) from error
    except ValueError as error:
        raise _of_another_connection(ref, error) from error


def get_small(ref: Any, timeout_s: float, session: Session) -> Any:
    """`get` for what is small, as an actor's answer is: Ray tells of it, and nobody has to look for it.

    Raises:
        Exception: As `get`.
    """
    if not is_beside():
        return get(ref, timeout_s, session)
    left_s, (told,) = await_told([ref], timeout_s, session)
    if told.done() and told.exception() is None:
        return told.result()
    return get(ref, left_s, session)  # Says what is wrong.


def not_here(refs: list[Any], timeout_s: float, session: Session) -> list[Any]:
    """Those objects that are not on this node after a while; a lost one counts as being here.

    Raises:
        TransportClosedError: The session over which they are waited for has ended.
    """
    try:
        return not_ready(refs, timeout_s, session)
    except ValueError as error:
        raise _of_another_connection(refs, error) from error


def register_nixl_pool(size_bytes: int, device: Any) -> None:
    """Register memory with NIXL once, for what is received."""
    ray_module()
    from ray.experimental.rdt import register_nixl_memory_pool

    with current_session().while_connected():
        register_nixl_memory_pool(size_bytes, device)


def put_by_nixl(tensor: Any) -> Any:
    """An object whose tensor stays where it is, for others to read by NIXL."""
    ray = ray_module()
    with current_session().while_connected():
        return ray.put([tensor], _tensor_transport="nixl")


def get_by_nixl(ref: Any, into: Any, timeout_s: float | None) -> Any:
    """The tensor of such an object: written into another one, unless that is None.

    Raises:
        TransportTimeoutError: It did not arrive in time; it may still be written.
        ShardLostError: Its owner died.
    """
    ray_module()
    from ray.experimental.rdt import set_target_for_ref

    if into is not None:
        with current_session().while_connected():
            set_target_for_ref(ref, [into])
    (found,) = get(ref, timeout_s)
    return found


def references_held() -> frozenset[str] | None:
    """Ids of the objects of this process that anybody in the cluster refers to; None where nobody knows.

    It takes microseconds for each object that this process ever referred to and still does.
    """
    ray_module()  # Says so in a forked child.
    if (session := Session.current()) is None:
        return frozenset()
    try:
        with session.while_connected():
            counts = core_worker().get_all_reference_counts()
    except AttributeError:
        return None
    return frozenset(i.decode() if isinstance(i, bytes) else i for i in counts)


def counts_references() -> bool:
    """Whether this Ray says which objects are referred to."""
    with current_session().while_connected():
        return hasattr(core_worker(), "get_all_reference_counts")


def when_unreferenced(ref: Any, tell: Callable[[str], object]) -> bool:
    """Have `tell` called with an object's id, in some thread, when nobody refers to it any more.

    Returns:
        Whether this Ray can; it is called once then, and else never.
    """
    with current_session().while_connected():
        add = getattr(core_worker(), "add_object_out_of_scope_callback", None)
        return add is not None and bool(add(ref, lambda gone: tell(gone.hex())))


def _no_room(error: Exception) -> TransportError:
    why = str(getattr(error, "cause", error)).splitlines()[0]
    return TransportError(
        f"no room in Ray's object store, nor on the disk that it spills to ({why}): "
        "withdraw offers, release shards, or expire() old steps"
    )


def _of_another_connection(ref: Any, error: ValueError) -> Exception:
    """The error of an object that Ray does not know of over this connection; any other as it is."""
    if "owner is unknown" not in str(error):
        return error
    return TransportClosedError(
        f"{_names(ref)} was put over a connection to Ray that has ended, and is gone with it"
    )


def _names(ref: Any) -> str:
    return f"one of {len(ref)} objects" if isinstance(ref, list) else f"object {ref.hex()}"


class RayByteStore:
    """Bytes in Ray's object store; tickets are ObjectRefs, read in place on any node.

    Objects live as long as the process that put them, and as long as any process holds their ticket.
    """

    release_scope = ""

    @property
    def ticket_type(self) -> type:
        """What `get` takes."""
        found: type = ray_module().ObjectRef
        return found

    def put(self, data: Bytes) -> Any:
        """Copy `data` into shared memory."""
        return put(data)

    def get(self, ticket: Any, timeout_s: float | None = None) -> Bytes:
        """The bytes, read-only and in place."""
        data: Bytes = get(ticket, timeout_s)
        return data

    def release(self, ticket: Any) -> None:
        """Nothing to do: an object goes with its last reference."""
