"""What a consumer needs of a cluster, and what a drawing needs of an occupant."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from raycrew.cluster_core._planning import Bundle, Placement, Rendezvous

T = TypeVar("T")


@runtime_checkable
class Claim(Protocol):
    """A slot on some bundles, held under a name until it is released."""

    @property
    def bundles(self) -> Sequence[Bundle]:
        """The claimed bundles, in the order that they were asked for."""
        ...

    def actor_options(self, position: int) -> dict[str, Any]:
        """Ray actor options that place a worker on `bundles[position]` with this claim's share of it."""
        ...

    def learn(self, devices: Mapping[int, int]) -> None:
        """Tell the cluster which physical device each position turned out to hold."""
        ...

    def settle(self) -> None:
        """Learn which devices the bundles hold, where the holder's processes have none and can't tell."""
        ...

    def check(self) -> None:
        """Make sure that the bundles are still there.

        Raises:
            ClusterError: Some are not; says which, and what became of them.
        """
        ...

    def give_back(self, positions: Collection[int]) -> None:
        """Give the slots on some of `bundles` back, and keep the others, whose positions stay; idempotent.

        Without any left, it is as `release`.

        Raises:
            IndexError: There is no such position.
        """
        ...

    def release(self) -> None:
        """Give all slots back; idempotent."""
        ...


@runtime_checkable
class Cluster(Protocol):
    """Bundles that workers can be placed on."""

    @property
    def bundles(self) -> Sequence[Bundle]:
        """All bundles, ordered by (node, device index)."""
        ...

    def claim(self, indices: Sequence[int] | None, holder: str) -> Claim:
        """Take one slot on each named bundle (all of them for None) for `holder`.

        Raises:
            ValueError: An index is out of range or repeated.
            ClusterError: A bundle has no free slot; the error names who holds them.
        """
        ...

    def rendezvous(self, bundle_index: int = 0, n_ports: int = 1) -> Rendezvous:
        """Lease `n_ports` ports on the node of a bundle until the cluster is shut down.

        Raises:
            IndexError: There is no such bundle.
        """
        ...

    def run_on_each_node(self, fn: Callable[[], T]) -> Iterator[tuple[str, T]]:
        """Run `fn` once on each node of the cluster; yield (node id, result) as nodes finish."""
        ...


@runtime_checkable
class Occupant(Protocol):
    """Whatever sits on bundles, as a drawing sees it."""

    @property
    def name(self) -> str:
        """Short name shown to people."""
        ...

    @property
    def placements(self) -> Sequence[Placement]:
        """Who sits where."""
        ...
