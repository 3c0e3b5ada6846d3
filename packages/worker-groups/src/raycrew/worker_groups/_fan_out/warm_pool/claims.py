"""CPUs for the processes of the pool: claimed while it works, and given back."""

import time
from collections.abc import Callable, Mapping

from ray.util.placement_group import PlacementGroup

from raycrew.worker_groups import _ray
from raycrew.worker_groups.errors import WorkerGroupError

# Ray counts resources as free again a little after a placement group is removed.
SETTLE_S = 3.0
GRANT_S = 5.0


class Claims:
    """One claim after the other, each on the CPUs of one or several nodes."""

    def __init__(self) -> None:
        self._claim: PlacementGroup | None = None
        self._wanted: Mapping[str, int] = {}
        self._granted: Mapping[str, int] = {}
        self._released_at = float("-inf")

    def take(self, slots: Mapping[str, int]) -> None:
        """Claim CPUs, by node id; granted or not, nobody waits."""
        self._wanted = slots
        self._claim = _ray.claim_cpus([float(n) for n in slots.values()])

    def free_cpus(self) -> dict[str, tuple[float, float]]:
        """Free and total CPUs by node id, without our own last claim, which may still be counted."""
        settled = self._released_at + SETTLE_S
        cpus = _ray.node_cpus()
        if time.monotonic() < settled and self._granted:
            ours = self._granted
            return {node: (max(free, ours.get(node, 0)), total) for node, (free, total) in cpus.items()}
        # The last call was too short for its claim to be granted, so wait, if none is free, for what settles.
        while cpus and time.monotonic() < settled and all(free < 1 for free, _ in cpus.values()):
            time.sleep(0.02)
            cpus = _ray.node_cpus()
        return cpus

    def release(self, is_reachable: Callable[[], bool]) -> None:
        """Give back what was taken last, if anything is.

        Args:
            is_reachable: Whether this process is still connected to Ray as it was then.
        """
        claim, self._claim = self._claim, None
        if claim is None or not is_reachable():
            return
        try:
            self._give_back(claim)
        except WorkerGroupError:
            if is_reachable():  # else the claim has ended with the connection
                raise

    def _give_back(self, claim: PlacementGroup) -> None:
        self._granted = {}
        try:
            if _is_granted(claim):
                self._granted = self._wanted
        finally:
            _ray.give_back(claim)
            self._released_at = time.monotonic()


def _is_granted(claim: PlacementGroup) -> bool:
    """Whether Ray has granted a claim, once it knows.

    Removed while Ray is granting it, a claim is lost for good every few hundred times (seen with Ray 2.60).
    """
    deadline = time.monotonic() + GRANT_S
    while (granted := _ray.is_granted(claim)) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(granted)
