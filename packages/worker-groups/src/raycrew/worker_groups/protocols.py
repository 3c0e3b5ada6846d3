"""What this package needs of others: environments, transports of arguments, data that can be split."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class NodeRunner(Protocol):
    """Runs a function on each node; every `Cluster` is one."""

    def run_on_each_node(self, fn: Callable[[], T]) -> Iterator[tuple[str, T]]:
        """Run `fn` once on each node; yield (node id, result) as nodes finish."""
        ...


@runtime_checkable
class EnvironmentProvider(Protocol):
    """Knows which Python environment a kind of worker runs in."""

    def python_for(self, actor_class_fqn: str, runner: NodeRunner | None) -> str | None:
        """Interpreter of a worker class's environment, ready on every node; None for the driver's own."""
        ...


@runtime_checkable
class ArgumentTransport(Protocol):
    """Hooks on the way of an argument out of the driver and into the worker; sent to workers by pickle."""

    def encode(self, value: Any) -> Any:
        """What to send in place of `value`; `value` itself where this transport does nothing for it."""
        ...

    def decode(self, value: Any) -> Any:
        """What the worker's method gets for a received `value`, which need not be an encoded one."""
        ...


@runtime_checkable
class Shardable(Protocol):
    """Data that can be split into equal shards and joined again."""

    def shard(self, n: int) -> Sequence[Any]:
        """Split into `n` shards, in order."""
        ...

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Join shards, in order."""
        ...


@runtime_checkable
class RowBatch(Protocol):
    """Data with rows, of which some can be taken: what `@sharded` splits, pads and joins."""

    @property
    def size(self) -> int:
        """Number of rows."""
        ...

    def slice(self, start: int, end: int) -> Any:
        """The rows from `start` up to `end`."""
        ...

    def pad_to_divisor(self, divisor: int) -> tuple[Any, int]:
        """A batch whose size is a multiple, made by adding its first rows, and how many those are."""
        ...

    @classmethod
    def concat(cls, parts: Sequence[Any]) -> Any:
        """Join batches, in order."""
        ...


@runtime_checkable
class RowHandles(Protocol):
    """Stands for rows that are elsewhere, as a column of a `SampleQueue`; never changed in place."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def select(self, rows: Sequence[int]) -> Any:
        """A handle on the rows of these numbers, in their order."""
        ...

    def join_rows(self, others: Sequence[Any]) -> Any:
        """A handle on these rows and those of other handles, one after another."""
        ...


@runtime_checkable
class WeightVersions(Protocol):
    """Holds weights: the version that samples are made by, or that they are compared with."""

    @property
    def version(self) -> int | None:
        """The version that is held; None for none yet."""
        ...
