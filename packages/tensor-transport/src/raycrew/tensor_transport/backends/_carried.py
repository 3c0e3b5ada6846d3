"""What backends have in common whose bytes go with their handles."""

import threading
from collections.abc import Sequence

from raycrew.tensor_transport._bytes import remake_in_child
from raycrew.tensor_transport._rows import StoreStats, TensorShardInfo


class CarriedByHandles:
    """Holds nothing, so that there is nothing to release; counts what was put."""

    travels_with_handles = True

    def __init__(self) -> None:
        self._put_shards = 0
        self._lock = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """A thread that held the lock is not there to let go of it."""
        self._lock = threading.Lock()

    def release(self, shards: Sequence[TensorShardInfo]) -> None:
        """Nothing to do: the bytes go with the last handle on them."""

    def expire(self, before_step: int) -> int:  # noqa: ARG002
        """Nothing to do."""
        return 0

    def stats(self) -> StoreStats:
        """How many this process has put; what is held, nobody here knows."""
        return StoreStats(put_shards=self._put_shards)

    def close(self) -> None:
        """Nothing to do."""

    def _count(self, put: int) -> None:
        with self._lock:
            self._put_shards += put
