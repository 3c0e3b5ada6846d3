"""Values that stores and their readers exchange."""

import dataclasses
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raycrew.tensor_transport._rows.indexing import Rows


@dataclass(frozen=True, slots=True)
class TensorShardInfo:
    """Where stored rows are, and what they look like; small and picklable.

    Attributes:
        scheme: Name of the backend that can read it.
        shard_id: Unique name of these bytes.
        owner: Who holds them: the epoch of a store, an address.
        node_id: The node they are on; "" where that does not matter.
        dtype: Name of the torch dtype, as "bfloat16".
        shape: Shape as stored.
        locator: Whatever the backend needs in order to find them.
        column_offset: First column that is stored, where padding columns were trimmed on storing.
        width: Number of columns before trimming; None where nothing was trimmed.
        pad_value: What the trimmed columns held.
        replicas: Other places with the same bytes, tried in order when this one fails.
    """

    scheme: str
    shard_id: str
    owner: str
    node_id: str
    dtype: str
    shape: tuple[int, ...]
    locator: Any = dataclasses.field(default=None, compare=False, repr=False)
    column_offset: int = 0
    width: int | None = None
    pad_value: float | int | bool | None = None
    replicas: tuple["TensorShardInfo", ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def name(self) -> str:
        """What the errors of a shard call it."""
        owner, node = self.owner or "none", self.node_id or "unknown"
        return f"shard {self.shard_id} of owner {owner} on node {node}"

    @property
    def identity(self) -> dict[str, str]:
        """What the errors of a shard carry."""
        return {"shard_id": self.shard_id, "owner": self.owner, "node_id": self.node_id}

    @property
    def size_bytes(self) -> int:
        """Bytes as stored."""
        return self.rows * self.row_bytes

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def rows(self) -> int:
        """Number of rows; 1 for a tensor without dimensions."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as stored."""
        size = self.torch_dtype.itemsize
        for length in self.shape[1:]:
            size *= length
        return size

    @property
    def columns(self) -> tuple[int, int]:
        """The columns that are stored, in the tensor's own numbering."""
        stored = self.shape[1] if len(self.shape) > 1 else 0
        return self.column_offset, self.column_offset + stored

    @property
    def full_width(self) -> int:
        """Number of columns before trimming."""
        return self.columns[1] if self.width is None else self.width


def new_shard_id() -> str:
    """A name that no other shard has."""
    return uuid.uuid4().hex


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class ShardRead:
    """What is wanted of one shard, in the coordinates of what is stored.

    Attributes:
        shard: The shard.
        rows: Which rows, None for all.
        columns: First and one past the last column, None for all.
        into: Contiguous memory of the wanted shape and dtype: a backend that copies may fill and return it.
    """

    shard: TensorShardInfo
    rows: Rows | None = None
    columns: tuple[int, int] | None = None
    into: torch.Tensor | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is wanted."""
        if not self.shard.shape:
            return ()
        rows = self.shard.rows
        if isinstance(self.rows, slice):
            rows = len(range(*self.rows.indices(rows)))
        elif self.rows is not None:
            rows = len(self.rows)
        rest = self.shard.shape[1:]
        if self.columns is not None:
            rest = (len(range(*slice(*self.columns).indices(rest[0]))), *rest[1:])
        return rows, *rest

    @property
    def size_bytes(self) -> int:
        """Bytes of what is wanted."""
        return math.prod(self.shape) * self.shard.torch_dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether everything is wanted."""
        return self.rows is None and self.columns is None

    def of(self, stored: torch.Tensor) -> torch.Tensor:
        """The wanted part of the stored tensor: a view unless the rows are a list."""
        part = stored
        if self.columns is not None:
            part = part[:, self.columns[0] : self.columns[1]]
        if self.rows is not None:
            part = part[self.rows] if isinstance(self.rows, slice) else part[torch.from_numpy(self.rows)]
        return part


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds now and has done so far; in a loop without leaks `shards` returns to its start.

    Attributes:
        shards: Shards held.
        held_bytes: Their bytes.
        peak_bytes: The most that was held at once.
        reserved_bytes: Memory taken for them, free arenas included.
        put_shards: Shards stored so far.
        released_shards: Shards released so far, by name or by step.
        oldest_step: The earliest step among those held; None without.
        leases: Readers that hold memory of this store at the moment, where that can be told.
    """

    shards: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    put_shards: int = 0
    released_shards: int = 0
    oldest_step: int | None = None
    leases: int = 0


def total(stats: Sequence[StoreStats]) -> StoreStats:
    """The sum over several stores."""
    steps = [s.oldest_step for s in stats if s.oldest_step is not None]
    sums = {
        f.name: sum(getattr(s, f.name) for s in stats)
        for f in dataclasses.fields(StoreStats)
        if f.name != "oldest_step"
    }
    return StoreStats(**sums, oldest_step=min(steps, default=None))


def check_alike(shards: Sequence[TensorShardInfo]) -> None:
    """Raise ValueError unless the rows of all shards make one tensor."""
    first = shards[0]
    for other in shards[1:]:
        rank = len(first.shape)
        if other.dtype != first.dtype or len(other.shape) != rank or other.shape[2:] != first.shape[2:]:
            raise ValueError(
                f"a shard of {other.dtype}{list(other.shape)} does not join {first.dtype}{list(first.shape)}"
            )
    if len(shards) > 1 and not first.shape:
        raise ValueError("tensors without dimensions have no rows to join")
