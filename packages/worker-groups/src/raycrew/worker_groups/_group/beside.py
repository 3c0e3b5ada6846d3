"""Places beside workers: the same bundles, of which nothing is taken."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from raycrew.cluster_core import Bundle, Claim, Cluster, Rendezvous

T = TypeVar("T")

_RESOURCES = {"num_cpus": 0, "num_gpus": 0, "resources": {}}


class Beside:
    """A `Cluster` of bundles that somebody holds, for processes on their nodes that take nothing of them.

    Such a process lives in its bundle's placement group, so that it ends with it at the latest. Which of the
    bundle's devices it uses is up to who starts it.

    Args:
        cluster: The cluster that the bundles are of.
        claim: Who holds them, for longer than anybody here.
        positions: Which of the claim's bundles, in the order that they are to have here.
    """

    def __init__(self, cluster: Cluster, claim: Claim, positions: Sequence[int]) -> None:
        self._cluster, self._claim, self._positions = cluster, claim, tuple(positions)

    @property
    def bundles(self) -> Sequence[Bundle]:
        """The bundles, in the order that was asked for; their indices are those of their cluster."""
        held = self._claim.bundles
        return [held[position] for position in self._positions]

    def claim(self, indices: Sequence[int] | None, holder: str) -> "ClaimBeside":  # noqa: ARG002 - of any number
        """Places on some bundles, by their indices in their cluster; as many holders as want to have any.

        Raises:
            ValueError: An index is not among these bundles.
        """
        position_of = {
            bundle.index: position for bundle, position in zip(self.bundles, self._positions, strict=True)
        }
        if indices is None:
            return ClaimBeside(self._claim, self._positions)
        if unknown := [index for index in indices if index not in position_of]:
            raise ValueError(f"bundles {unknown} are not among {sorted(position_of)}")
        return ClaimBeside(self._claim, [position_of[index] for index in indices])

    def rendezvous(self, bundle_index: int = 0, n_ports: int = 1) -> Rendezvous:
        """Lease ports on the node of a bundle, until the cluster itself is shut down."""
        return self._cluster.rendezvous(bundle_index, n_ports)

    def run_on_each_node(self, fn: Callable[[], T]) -> Iterator[tuple[str, T]]:
        """Run `fn` once on each node of the whole cluster."""
        return self._cluster.run_on_each_node(fn)


class ClaimBeside:
    """Places on bundles of another claim, which stay that one's."""

    def __init__(self, claim: Claim, positions: Sequence[int]) -> None:
        self._claim, self._positions = claim, tuple(positions)

    @property
    def bundles(self) -> Sequence[Bundle]:
        """The bundles, in the order that was asked for."""
        held = self._claim.bundles
        return [held[position] for position in self._positions]

    def actor_options(self, position: int) -> dict[str, Any]:
        """Ray actor options that place a worker on the bundle, with nothing of it."""
        options = self._claim.actor_options(self._positions[position])
        return {**{k: v for k, v in options.items() if k != "memory"}, **_RESOURCES}

    def learn(self, devices: Mapping[int, int]) -> None:
        """Nothing: who holds the bundles tells."""

    def settle(self) -> None:
        """Nothing: who holds the bundles asks."""

    def check(self) -> None:
        """Make sure that the bundles are still there.

        Raises:
            ClusterError: Some are not.
        """
        self._claim.check()

    def give_back(self, positions: Collection[int]) -> None:
        """Nothing: the bundles are another's."""

    def release(self) -> None:
        """Nothing: the bundles are another's."""
