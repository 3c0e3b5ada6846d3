"""Large tensors in arguments and results of worker groups travel as handles."""

from contextlib import suppress
from typing import Any

from raycrew.tensor_transport._bytes import is_plain
from raycrew.tensor_transport._handles.registry import ShardRegistry
from raycrew.tensor_transport._handles.walk import ContainsItselfError, localize, remotize
from raycrew.tensor_transport.backends.node_memory import NodeMemoryBackend
from raycrew.tensor_transport.backends.ray_refs import RayRefBackend

_TIDY_S = 1.0


class TensorArguments:
    """Fits `ArgumentTransport` of worker-groups: tensors become handles on their way, and tensors again.

    The driver sees handles only; a result of one group that is passed to another goes from worker to worker.
    Tensors arrive on the CPU and without gradients. What can't be a handle is left as it is: sparse or
    quantised tensors, structures that contain themselves, and handles of other schemes than the registry's.

    Args:
        min_bytes: Smaller tensors travel as they are.
        registry: Where tensors are put and read. By default both are kept alive by the handles: memory that
            workers on the same machine map without a copy, each with its own writes (`NodeMemoryBackend`),
            and Ray's object store across machines, from which each worker has a copy. A result goes with the
            worker that made it; with `ShardRegistry(ObjectStoreBackend.start())` it is handed to its node's
            store, outlives the worker, and is there until it is released or expires.
        timeout_s: Deadline of the reads for one argument.
        borrow: Give workers what is in Ray's object store in place, too, without a copy, for reading only: a
            write shows in the other workers, or ends the process.
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
        self._registry = registry or ShardRegistry(NodeMemoryBackend(), RayRefBackend())
        self._timeout_s = timeout_s
        self._borrow = borrow

    def encode(self, value: Any) -> Any:
        """The value with handles in place of its large tensors; itself where there is none."""
        self._tidy()
        with suppress(ContainsItselfError):
            return remotize(value, self._registry, min_bytes=self._min_bytes, only=is_plain)
        return value

    def decode(self, value: Any) -> Any:
        """The value with tensors in place of this transport's handles; itself where there is none."""
        self._tidy()
        with suppress(ContainsItselfError):
            return localize(
                value,
                self._registry,
                only=self._registry.__contains__,
                timeout_s=self._timeout_s,
                borrow=self._borrow,
            )
        return value

    def _tidy(self) -> None:
        """Calls without tensors also take memory back."""
        for backend in self._registry.backends.values():
            if isinstance(backend, NodeMemoryBackend):
                backend.collect(every_s=_TIDY_S)
