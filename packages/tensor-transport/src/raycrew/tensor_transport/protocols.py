"""What this package needs of others: groups of peers to call, and stores to keep bytes in."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport._rows import Rows, ShardRead, StoreStats, TensorShardInfo

Bytes = npt.NDArray[np.uint8]


@runtime_checkable
class PeerResults(Protocol):
    """What a call on several ranks will give."""

    def get_results(self, *, timeout: float | None = None) -> Any:
        """Wait for all ranks; the list of their results in rank order."""
        ...


@runtime_checkable
class SupervisedResults(PeerResults, Protocol):
    """Results of a group that may replace a lost worker, and call it again, before `get_results` raises."""

    def exception(self, *, timeout: float | None = None) -> Exception | None:
        """Wait for all ranks; what became of the call, at once and before anything is done about it."""
        ...


@runtime_checkable
class Peers(Protocol):
    """Some processes that are called as a unit."""

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> PeerResults:
        """Call a method with the same arguments on every rank."""
        ...


@runtime_checkable
class PeerGroup(Peers, Protocol):
    """Processes that are called as a unit, one per rank."""

    @property
    def ranks(self) -> Sequence[Any]:
        """One entry per rank, with at least `rank`, `node_id` and `device_index`."""
        ...

    def on(self, ranks: Sequence[int]) -> Peers:
        """The same group, restricted to some ranks."""
        ...


@runtime_checkable
class ByteStore(Protocol):
    """Keeps immutable runs of bytes for other processes; a ticket is whatever finds them again.

    Only the store that put bytes has to be able to release them. One with an attribute `release_scope` says
    that all stores with the same one can; "" says that nobody has to, as bytes go with their last ticket.
    """

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


@runtime_checkable
class RowHandle(Protocol):
    """Stands for rows that are somewhere else, as a column of a batch; never changed in place."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def take_rows(self, rows: Rows) -> "RowHandle":
        """Some rows, by a forward slice or row numbers."""
        ...

    def take_ranges(self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> "RowHandle":
        """Several runs of rows, one after another."""
        ...

    def join_rows(self, others: Sequence[Any]) -> "RowHandle":
        """These rows and those of other handles, one after another."""
        ...

    def truncate_columns(self, length: int) -> "RowHandle":
        """At most `length` columns."""
        ...


@runtime_checkable
class HandleReader(Protocol):
    """What reads handles: a registry, or what stands for one in another process."""

    def __contains__(self, handle: object) -> bool:
        """Whether there is a backend for every shard of a handle."""
        ...

    def fetch(
        self, handles: Sequence[Any], *, timeout_s: float | None = 600.0, borrow: bool = False
    ) -> list[torch.Tensor]:
        """The tensors that handles name."""
        ...

    def for_others(self) -> "HandleReader | None":
        """What goes along with a pickled handle; None where nothing does."""
        ...


@runtime_checkable
class ShardBackend(Protocol):
    """One way to keep tensors and to read them from other processes; thread-safe.

    A backend object can be pickled, and then reads in another process what this one stored. Where it has an
    attribute `reads_over_network` that is true, registries may cache what they read. Where it has one
    `travels_with_handles` that is true, another one made without arguments reads the same in any process, and
    handles take the class along. `node_ids` and `clear_node(node_id)` let `clear_node` empty its stores.
    """

    @property
    def scheme(self) -> str:
        """The name that its shards carry."""
        ...

    def put(self, tensors: Sequence[torch.Tensor], *, step: int | None = None) -> list[TensorShardInfo]:
        """Keep copies of CPU tensors, all or none; `step` is the lease that `expire` ends.

        Raises:
            TransportError: There is no room, or no store to be reached.
        """
        ...

    def fetch(self, reads: Sequence[ShardRead], *, timeout_s: float | None = None) -> list[torch.Tensor]:
        """The wanted parts, one request for each owner.

        Raises:
            StaleHandleError: A shard was released, or its owner restarted.
            ShardLostError: An owner died or cannot be reached.
            TransportTimeoutError: They did not arrive in time.
        """
        ...

    @property
    def gives_own_memory(self) -> bool:
        """Whether fetched tensors may be written to; else they are shared and have to be copied first."""
        ...

    def release(self, shards: Sequence[TensorShardInfo]) -> None:
        """Give shards up, wherever they are; those that are gone already are no error."""
        ...

    def expire(self, before_step: int) -> int:
        """Release what was put with an earlier step; how many shards that were."""
        ...

    def stats(self) -> StoreStats:
        """What is held."""
        ...

    def close(self) -> None:
        """Give up what this object holds; idempotent."""
        ...
