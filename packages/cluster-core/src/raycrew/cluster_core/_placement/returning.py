"""What this process gave back a moment ago, and nodes do not show as free yet."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from time import monotonic

from raycrew.cluster_core._planning import RESOURCE_STEP, Bundle, NodeState
from raycrew.cluster_core._ray import PerProcess

_LONGEST_S = 2.0


class Returning:
    """Amounts on their way back, so that a plan right after a shutdown does not count them as taken.

    Without it a cluster that is made anew could lie on other nodes than before.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._expected: dict[str, dict[str, float]] = {}
        self._until = 0.0
        self._lock = PerProcess(Lock)

    def note(self, nodes: Iterable[NodeState], bundles: Iterable[Bundle]) -> None:
        """Note that bundles are about to be given back on nodes as they are now."""
        amounts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for bundle in bundles:
            for name, amount in bundle.resources.items():
                amounts[bundle.node_id][name] += amount
        with self._lock.here:
            self._until = self._clock() + _LONGEST_S
            for node in nodes:
                before: Mapping[str, float] = self._expected.get(node.node_id, {})
                for name, amount in amounts.get(node.node_id, {}).items():
                    free = max(before.get(name, 0.0), node.free.get(name, 0.0))
                    expected = self._expected.setdefault(node.node_id, {})
                    expected[name] = min(free + amount, node.total.get(name, 0.0))

    def settled(self, nodes: Iterable[NodeState]) -> bool:
        """Whether nodes show all of it as free; whatever does not come in time was taken by somebody else."""
        with self._lock.here:
            if not self._expected or self._clock() > self._until:
                self._expected.clear()
                return True
            missing = {}
            for node in nodes:
                expected = self._expected.get(node.node_id, {})
                if any(
                    amount - node.free.get(n, 0.0) > 0.5 / RESOURCE_STEP for n, amount in expected.items()
                ):
                    missing[node.node_id] = expected
            self._expected = missing
            return not missing
