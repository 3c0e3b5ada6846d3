"""What the clocks of nodes show, by this process's own: estimated at the round trip of a question. Pure."""

from dataclasses import dataclass

#: How fast two clocks may drift apart, in seconds per second.
DRIFT = 2e-4


@dataclass(frozen=True, slots=True)
class Offset:
    """How far a node's monotonic clock is ahead of this process's.

    Attributes:
        ahead_s: Seconds.
        bound_s: How wrong that may be, when it was estimated: half the round trip.
        at: When that was.
    """

    ahead_s: float
    bound_s: float
    at: float

    def bound_at(self, now: float) -> float:
        """How wrong it may be by now."""
        return self.bound_s and self.bound_s + DRIFT * (now - self.at)


class Clocks:
    """Of all nodes that were asked.

    Args:
        own: What this process's own clock is called: nodes whose clock is called the same share it.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._offsets: dict[str, Offset] = {}

    def observe(self, node_id: str, clock: str, theirs: float, before: float, after: float) -> Offset:
        """Take in what a node's clock showed at some moment between two of this process's; what is known now.

        Args:
            node_id: Which node.
            clock: What its clock is called.
            theirs: What it showed.
            before: When it was asked.
            after: When its answer was there.

        Raises:
            ValueError: That was before.
        """
        if after < before:  # half of that would bound no error, and no later bound would be below it
            raise ValueError(f"node {node_id} was asked at {before} and has answered at {after}")
        if clock == self._own:
            found = Offset(0.0, 0.0, after)
        else:
            found = Offset(theirs - (before + after) / 2, (after - before) / 2, after)
        known = self._offsets.get(node_id)
        if known is None or found.bound_s <= known.bound_at(after):
            self._offsets[node_id] = found
        return self._offsets[node_id]

    def bounds(self) -> dict[str, float]:
        """By node, how wrong its times may be, in seconds, when last estimated."""
        return {node_id: offset.bound_s for node_id, offset in self._offsets.items()}
