"""What has become of samples so far, counted. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raycrew.worker_groups.rollouts.samples._states import WHOLE, Ledger, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStats:
    """What a queue holds, and what has become of samples since it was made.

    Attributes:
        version: The newest version of the weights that anybody has told of.
        held: Samples that it holds, in whatever state.
        leased: Of those, how many somebody has.
        partial: Of those, how many are parts of rollouts that go on.
        in_memory_bytes: Of rows in memory; handles don't count.
        on_disk_bytes: Of rows that are only on disk.
        produced: Samples that came.
        consumed: Samples that were used up and are done.
        dropped: Samples that were dropped, as they were too old.
        rescored: How often a sample was found too old, and has lost columns to be scored anew.
        returned: How often a sample came back, given back or as its lease ended.
        handed_out: Samples that were handed out to be used up, those that came back each time.
        versions_behind: Of these, how many versions they were behind when they were handed out, in all.
        waited_s: Of these, the seconds since they came, in all.
    """

    version: int = 0
    held: int = 0
    leased: int = 0
    partial: int = 0
    in_memory_bytes: int = 0
    on_disk_bytes: int = 0
    produced: int = 0
    consumed: int = 0
    dropped: int = 0
    rescored: int = 0
    returned: int = 0
    handed_out: int = 0
    versions_behind: int = 0
    waited_s: float = 0.0

    @property
    def mean_versions_behind(self) -> float:
        """How many versions a sample was behind, on average, when it was handed out to be used up."""
        return self.versions_behind / max(1, self.handed_out)

    @property
    def mean_waited_s(self) -> float:
        """How long after it came a sample was handed out to be used up, on average, in seconds."""
        return self.waited_s / max(1, self.handed_out)


def ages(taken: Sequence[Sample], version: int, now: float) -> dict[str, float]:
    """What samples add to the tally that are handed out to be used up."""
    return {
        "handed_out": len(taken),
        "versions_behind": sum(version - sample.tag for sample in taken),
        "waited_s": sum(now - sample.born for sample in taken),
    }


def stats_of(
    ledger: Ledger, in_memory_bytes: int, on_disk_bytes: int, tally: Mapping[str, float]
) -> SampleStats:
    """What a queue holds, and what has happened."""
    held = ledger.samples.values()
    so_far: dict[str, Any] = {name: tally[name] for name in TALLIED}
    return SampleStats(
        version=ledger.version,
        held=len(held),
        leased=len(ledger.leases),
        partial=sum(not sample.mask & WHOLE for sample in held),
        in_memory_bytes=in_memory_bytes,
        on_disk_bytes=on_disk_bytes,
        **so_far,
    )


#: What is told of as it happens, in this order.
TALLIED = (
    "produced",
    "consumed",
    "dropped",
    "rescored",
    "returned",
    "handed_out",
    "versions_behind",
    "waited_s",
)
