"""What sharding by batch size gives: the shards and the order of their rows, in one value."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

PartT = TypeVar("PartT")


@dataclass(frozen=True)
class ShardedBatch(Generic[PartT]):
    """The shards of a batch, and which of its rows they hold.

    `shards, order = batch.shard_by_batch_size(...)` takes it apart. Passed as it is to a group of workers,
    as an argument that is split over ranks, each rank gets its shard. It is no sequence, so that nobody
    takes the pair for two shards: `.shards` is the list.

    Attributes:
        shards: One for each rank.
        order: The rows' numbers in the order in which `concat(shards)` has them; `reorder_data` takes them.
    """

    shards: list[PartT]
    order: Sequence[int]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.shards, self.order))

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(f"shards and their order are no sequence: take .shards[{index!r}], or .order")

    def __len__(self) -> NoReturn:
        raise TypeError("shards and their order have no length: take len(.shards)")

    def __bool__(self) -> bool:
        return True

    def shard(self, n: int) -> list[PartT]:
        """The shards.

        Raises:
            ValueError: `n` is not their number.
        """
        if n != len(self.shards):
            raise ValueError(f"the batch was sharded into {len(self.shards)}, and {n} shards are needed")
        return self.shards

    @staticmethod
    def concat(parts: Sequence[Any]) -> Any:
        """Join shards, or what was made of each: as their class does."""
        return type(parts[0]).concat(parts)
