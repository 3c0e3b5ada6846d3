"""What this package needs of a cluster."""

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class NodeRunner(Protocol):
    """Whatever can run a function once on each node.

    A runner whose method also takes `timeout_s` is told how long a build may take.
    """

    def run_on_each_node(self, fn: Callable[[], T]) -> Iterator[tuple[str, T]]:
        """Run `fn` once on each node; yield (node id, result) as nodes finish."""
        ...
