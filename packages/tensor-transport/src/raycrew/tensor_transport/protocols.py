"""What this package needs of others: groups of peers to call, and stores to keep bytes in."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@runtime_checkable
class PeerResults(Protocol):
    """What a call on several ranks will give."""

    def get_results(self, *, timeout: float | None = None) -> list[Any]:
        """Wait for all ranks; their results in rank order."""
        ...


@runtime_checkable
class PeerGroup(Protocol):
    """Processes that are called as a unit, one per rank."""

    @property
    def ranks(self) -> Sequence[Any]:
        """One entry per rank, with at least `rank`, `node_id` and `device_index`."""
        ...

    def call(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> PeerResults:
        """Call a method with the same arguments on every rank."""
        ...

    def on(self, *, ranks: Sequence[int]) -> "PeerGroup":
        """The same group, restricted to some ranks."""
        ...


@runtime_checkable
class ByteStore(Protocol):
    """Keeps immutable runs of bytes for other processes; a ticket is whatever finds them again."""

    def put(self, data: Bytes) -> Any:
        """Keep a copy of `data`; the caller may overwrite it as soon as this returns."""
        ...

    def get(self, ticket: Any, timeout_s: float | None = None) -> Bytes:
        """The bytes, read-only, in place where the store can.

        Raises:
            TransportTimeoutError: They did not arrive in time.
            ShardError: They are gone, or their owner is.
        """
        ...

    def release(self, ticket: Any) -> None:
        """Give the bytes up; idempotent."""
        ...
