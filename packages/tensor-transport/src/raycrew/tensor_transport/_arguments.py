"""Large tensors in arguments and results of worker groups travel as handles."""

from typing import Any

from raycrew.tensor_transport._registry import ShardRegistry
from raycrew.tensor_transport._walk import localize, remotize
from raycrew.tensor_transport.backends.ray_refs import RayRefBackend
from raycrew.tensor_transport.rtensor import RTensor


class TensorArguments:
    """Fits `ArgumentTransport` of worker-groups: tensors become handles on their way, and tensors again.

    The driver sees handles only; a result of one group that is passed to another goes from worker to worker.
    Handles of other schemes than the registry's are left as they are.

    Args:
        min_bytes: Smaller tensors travel as they are.
        registry: Where tensors are put and read: Ray's object store, kept alive by the handles, unless given.
        timeout_s: Deadline of the reads for one argument.
        borrow: Give workers the tensors in place in the store's memory, without a copy, for reading only: a
            write shows in the other workers, or ends the process. By default each worker has its own copy.
    """

    def __init__(
        self,
        min_bytes: int = 256 * 1024,
        *,
        registry: ShardRegistry | None = None,
        timeout_s: float | None = 600.0,
        borrow: bool = False,
    ) -> None:
        if min_bytes < 0:
            raise ValueError(f"min_bytes must not be negative, got {min_bytes}")
        self._min_bytes = min_bytes
        self._registry = registry if registry is not None else ShardRegistry(RayRefBackend())
        self._timeout_s = timeout_s
        self._borrow = borrow

    def encode(self, value: Any) -> Any:
        """The value with handles in place of its large tensors; itself where there is none."""
        return remotize(value, self._registry, min_bytes=self._min_bytes)

    def decode(self, value: Any) -> Any:
        """The value with tensors in place of this transport's handles; itself where there is none."""
        return localize(
            value, self._registry, only=self._is_ours, timeout_s=self._timeout_s, borrow=self._borrow
        )

    def _is_ours(self, handle: RTensor) -> bool:
        return all(shard.scheme in self._registry.backends for shard in handle.shards)
