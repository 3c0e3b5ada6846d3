"""Every Ray call of this package, one function each; importing this module does not import Ray."""

from typing import Any

from raycrew.tensor_transport.errors import ShardLostError, TransportError, TransportTimeoutError
from raycrew.tensor_transport.protocols import Bytes


def ray_module() -> Any:
    """The `ray` module.

    Raises:
        TransportError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise TransportError("Ray is not installed: install raycrew-tensor-transport[ray]") from error
    return ray


def put(value: Any) -> Any:
    """Copy `value` into the object store of this node; an ObjectRef owned by this process."""
    return ray_module().put(value)


def get(ref: Any, timeout_s: float | None = None) -> Any:
    """Read an object, in place where its type allows.

    Raises:
        TransportTimeoutError: It did not arrive within `timeout_s`.
        ShardLostError: Its owner died or its bytes are lost.
    """
    ray = ray_module()
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise TransportTimeoutError(f"object {ref.hex()} did not arrive within {timeout_s} s") from error
    except ray.exceptions.ObjectLostError as error:
        message = f"object {ref.hex()} is lost: the process that published it died or its node is gone"
        raise ShardLostError(message, shard_id=ref.hex()) from error


class RayByteStore:
    """Bytes in Ray's object store; tickets are ObjectRefs, read in place on any node.

    Objects live as long as the process that put them, and as long as any process holds their ticket.
    """

    def put(self, data: Bytes) -> Any:
        """Copy `data` into shared memory."""
        return put(data)

    def get(self, ticket: Any, timeout_s: float | None = None) -> Bytes:
        """The bytes, read-only and in place."""
        data: Bytes = get(ticket, timeout_s)
        return data

    def release(self, ticket: Any) -> None:
        """Nothing to do: an object goes with its last reference."""
